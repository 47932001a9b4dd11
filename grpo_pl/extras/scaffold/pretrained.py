"""The configuration of a task for a pretrained policy: lengths in its tokens, the reward, which weights."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from grpo_pl.data.sources import PromptSource
from grpo_pl.extras.scaffold.kinds import Draft
from grpo_pl.functional.sampling import row_key
from grpo_pl.policy.loading import PolicyConfig, context_length, load_model, load_tokenizer
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards.answer_reading import is_plain_number
from grpo_pl.training.defaults import Kind, peak_rate
from grpo_pl.types import Problem

LOOKED_AT = 64
"""Problems whose lengths are measured."""
SHORTEST = 16
"""Tokens of a completion that are always allowed."""
LARGE = 10**9
"""From so many parameters on, adapters are trained if nobody says: AdamW needs 16 bytes for each weight it moves."""
BOLDER = 3.0
"""Times the derived rate, which is for a policy of which nothing is known: after a cold start SmolLM2-135M learns more
by this one (docs/own_model.md)."""
START_STEPS, START_BATCH, START_PASSES = 32, 8, 3
"""Of the cold start: steps at most, demonstrations of a step, and passes over them at most."""
SYSTEM = "Give the final answer between <answer> and </answer>."


def asked_config(path: str, source: PromptSource, drafted: Draft, *, lora: bool | None) -> dict[str, object]:
    """The values that fill the configuration of a task whose problems are asked and answered.

    Args:
        path: of the model.
        lora: train adapters; None goes by the size of the model.
    """
    values, tokenizer, context = _model_values(path, lora=lora)
    problems = list(islice(source.problems("train") or source.prompts(0, count=LOOKED_AT), LOOKED_AT))
    template = PromptTemplate(system=SYSTEM)
    prompt = max(len(template.encode(problem.asked, tokenizer)) for problem in problems)
    shown = [_demonstration(problem, source) for problem in problems]
    longest = max(len(tokenizer(text, add_special_tokens=False).input_ids) for text in shown) + 1
    completion = -(-max(SHORTEST, 2 * longest) // 8) * 8
    if context is not None and prompt + completion > context:
        raise ValueError(
            f"{path!r} reads {context} tokens, fewer than a prompt of {prompt} and a completion of {completion}."
        )
    numbers = drafted.kind == "rows" and all(is_plain_number(problem.answer) for problem in problems)
    print(
        f"prompts of up to {prompt} tokens, completions of up to {completion}; answers are read "
        f"{'as numbers, wherever they stand last' if numbers else 'by the reward of task.py'}."
    )
    shown_rows = source.demonstrated()
    steps = START_STEPS if shown_rows is None else min(START_STEPS, max(1, START_PASSES * shown_rows // START_BATCH))
    values |= {"system": json.dumps(SYSTEM), "completion": completion, "cold_steps": steps, "cold_batch": START_BATCH}
    return {**values, "reward": _NUMBER} if numbers else values


def played_config(path: str, drafted: Draft, *, lora: bool | None) -> dict[str, object]:
    """The values that fill the configuration of a task that is played in an environment, likewise."""
    values, _, _ = _model_values(path, lora=lora)
    told = f"You act in {drafted.values['id']}. Answer what you see with the number of an action, "
    return {**values, "system": json.dumps(f"{told}{drafted.values['actions']}.")}


def _model_values(path: str, *, lora: bool | None) -> tuple[dict[str, object], Any, int | None]:
    """What a configuration says of the model, its tokenizer, and the tokens that it reads."""
    policy = PolicyConfig(path=path)
    tokenizer = load_tokenizer(policy)
    with torch.device("meta"):
        model = load_model(policy, tokenizer, weights=False)
    parameters = sum(weight.numel() for weight in model.parameters())
    adapters = parameters >= LARGE if lora is None else lora
    kind: Kind = "adapters" if adapters else "trained before"
    has_template = getattr(tokenizer, "chat_template", None)
    chat = "its own chat template" if has_template else "plain text: it has no chat template"
    trained = "of which adapters are trained" if adapters else "all trained"
    print(f"{parameters / 1e6:.3g}M parameters, {trained}; {chat}.")
    most = peak_rate(parameters, "from scratch") * (10.0 if adapters else 1.0)
    values: dict[str, object] = {
        "policy": json.dumps(str(here.resolve()) if (here := Path(path)).exists() else path),
        "lora": _LORA if adapters else "",
        "chat": chat,
        "lr": f"{min(BOLDER * peak_rate(parameters, kind), most):.1e}",
        "rate_of": f"{parameters / 1e6:.3g}M parameters, {kind}",
    }
    return values, tokenizer, context_length(model.config)


def _demonstration(problem: Problem, source: PromptSource) -> str:
    """The longest of some: with its work."""
    shown = [source.demonstration(problem, random.Random(row_key("new", problem.id, n))) for n in range(8)]
    known = [text for text in shown if text is not None]
    if not known:
        raise ValueError(f"{problem.question[:60]!r} has no answer, so nothing to show the policy in a cold start.")
    return max(known, key=len)


_LORA = """    lora:  # low-rank adapters are trained, and all else is frozen; leave `lora` out to train all weights
      rank: 16
      alpha: 32.0
"""
_NUMBER = """    - class_path: grpo_pl.rewards.MathReward
      init_args:
        answer_in: last_number  # wherever it stands; `Right` of task.py reads <answer> only
"""
