"""The reference policy that the KL term pulls towards: a frozen copy, or one renewed now and then."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from grpo_pl.distributed.sharding import load_whole_state_dict, whole_state_dict
from grpo_pl.policy.lora import has_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Reference:
    """A copy of the policy that takes no gradient. Not a module: it stays out of checkpoints and of ``.train()``.
    Of a policy with adapters it is no copy, but that policy, to be asked with its adapters off.

    Args:
        policy: copied as it is now.
        update_every: rollouts between two renewals (DeepSeekMath, arXiv:2402.03300, algorithm 1); None never renews.
    """

    def __init__(self, policy: PreTrainedModel, update_every: int | None) -> None:
        self.update_every = update_every
        if not has_adapters(policy):
            self.model = copy.deepcopy(policy).requires_grad_(False).eval()
        elif update_every is None:
            self.model = policy  # scored with its adapters off
        else:
            raise ValueError(
                "algorithm.reference refreshed needs a copy of the policy, which policy.lora does without: "
                "set reference frozen and ref_update_every null, or lora null."
            )

    def renew(self, policy: PreTrainedModel, rollout: int) -> None:
        """Copies the policy's weights if a renewal is due before rollout ``rollout``."""
        if self.update_every is not None and rollout > 0 and rollout % self.update_every == 0:
            self.model.load_state_dict(policy.state_dict())  # both sharded, or neither

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold: nothing for a frozen reference, which is always the policy's start.

        Every process must call it; the first one gets the weights.
        """
        return {} if self.update_every is None else whole_state_dict(self.model)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if state:
            load_whole_state_dict(self.model, state)
