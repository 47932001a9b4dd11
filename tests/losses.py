"""The loss of tokens that a test names one by one."""

from torch import Tensor

from grpo_pl.functional.losses import LossOutput
from grpo_pl.functional.trust_region import LikelyTokens
from grpo_pl.objective.algorithm import GRPOAlgorithm


def loss_of_tokens(
    algorithm: GRPOAlgorithm, *, weights: Tensor, likely: LikelyTokens | None = None, **tokens: Tensor | None
) -> LossOutput:
    """`GRPOAlgorithm.loss` of the tokens that are not None."""
    given = {name: tensor for name, tensor in tokens.items() if tensor is not None}
    if likely is not None:
        given |= dict(zip(("top_logprobs", "sampling_top_logprobs", "top_is_drawn"), likely, strict=True))
    return algorithm.loss(given, weights)
