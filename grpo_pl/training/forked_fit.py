"""What a fit in processes that Lightning forks, as in a notebook, leaves in the process that forked them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher

from grpo_pl.evaluation.held_out import MetricResult
from grpo_pl.policy.loading import load_model, load_tokenizer

_KEY = "forked_fit"


def send_results(module: Any) -> None:
    """Has the weights, which Lightning sends from the first of its processes to the one that forked them, carry what
    belongs to them; elsewhere it does nothing."""
    if not isinstance(module.trainer.strategy.launcher, _MultiProcessingLauncher) or not module.trainer.training:
        return
    results = {
        "characters": module.policy_config.characters,
        "decoder": module.decoder,
        "held_out": {name: asdict(result) for name, result in module.held_out.items()},
        "unjudged": module.unjudged,
        "held_out_counts": module.held_out_counts,
    }
    module.register_state_dict_post_hook(lambda _, state, *rest: state.update({_KEY: results}))


def take_results(module: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights in ``state``; where they are of such a fit, builds the policy for them, which Lightning would drop,
    and takes the rest."""
    if _KEY not in state:
        return state
    results = state[_KEY]
    module.policy_config = replace(module.policy_config, characters=results["characters"])
    module.held_out = {name: MetricResult(**result) for name, result in results["held_out"].items()}
    module.decoder = results["decoder"]
    module.unjudged, module.held_out_counts = results["unjudged"], results["held_out_counts"]
    if module.policy is None:
        module.tokenizer = load_tokenizer(module.policy_config)
        frozen = module.policy_config.quantization is not None  # weights that are not trained are not sent
        module.policy = load_model(module.policy_config, module.tokenizer, weights=frozen)
    return {name: weight for name, weight in state.items() if name != _KEY}
