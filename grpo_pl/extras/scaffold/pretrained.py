"""The configuration of a task for a pretrained policy: lengths in its tokens, examples, the reward, which weights."""

from __future__ import annotations

import json
import random
import textwrap
from pathlib import Path

import torch
import yaml

from grpo_pl.data.sources import PromptSource
from grpo_pl.functional.sampling import row_key
from grpo_pl.policy.loading import PolicyConfig, context_length, load_model, load_tokenizer
from grpo_pl.policy.template import Example, PromptTemplate
from grpo_pl.rewards.answer_reading import is_plain_number
from grpo_pl.training.defaults import Kind, peak_rate
from grpo_pl.types import Problem

EXAMPLES = 2
LOOKED_AT = 64
"""Problems whose lengths are measured."""
SHORTEST = 32
"""Tokens of a completion that are always allowed: a model that was not taught to be brief needs some."""
LARGE = 10**9
"""From so many parameters on, adapters are trained if nobody says: AdamW needs 16 bytes for each weight it moves."""
SYSTEM = "Give the final answer between <answer> and </answer>."


def pretrained_config(path: str, source: PromptSource, name: str, *, lora: bool | None) -> dict[str, object]:
    """The values that fill the configuration of the task ``name``.

    Args:
        path: of the model.
        lora: train adapters; None goes by the size of the model.
    """
    policy = PolicyConfig(path=path)
    tokenizer = load_tokenizer(policy)
    with torch.device("meta"):
        model = load_model(policy, tokenizer, weights=False)
    parameters = sum(weight.numel() for weight in model.parameters())
    adapters = parameters >= LARGE if lora is None else lora
    problems = list(source.problems("train") or source.prompts(0, count=LOOKED_AT))[:LOOKED_AT]
    examples = _examples(problems, source)
    template = PromptTemplate(system=SYSTEM, examples=examples)
    prompt = max(len(template.encode(problem.asked, tokenizer)) for problem in problems)
    shown = [_demonstration(problem, source) for problem in problems]
    longest = max(len(tokenizer(text, add_special_tokens=False).input_ids) for text in shown) + 1
    completion = -(-max(SHORTEST, 2 * longest) // 8) * 8
    context = context_length(model.config)
    if context is not None and prompt + completion > context:
        raise ValueError(
            f"{path!r} reads {context} tokens, fewer than a prompt of {prompt} and a completion of {completion}."
        )
    numbers = all(is_plain_number(problem.answer) for problem in problems)
    kind: Kind = "adapters" if adapters else "trained before"
    has_template = getattr(tokenizer, "chat_template", None)
    chat = "its own chat template" if has_template else "plain text: it has no chat template"
    trained = "of which adapters are trained" if adapters else "all trained"
    print(f"{parameters / 1e6:.3g}M parameters, {trained}; {chat}.")
    print(
        f"prompts of up to {prompt} tokens, completions of up to {completion}; answers are "
        f"{'numbers, read wherever they stand last' if numbers else 'texts, read between <answer> and </answer>'}."
    )
    shots = [{"question": one.question, "completion": one.completion} for one in examples]
    shown_examples = yaml.safe_dump(shots, sort_keys=False, allow_unicode=True, width=10**6).rstrip()
    return {
        "policy": json.dumps(str(here.resolve()) if (here := Path(path)).exists() else path),
        "lora": _LORA if adapters else "",
        "chat": chat,
        "system": json.dumps(SYSTEM),
        "examples": textwrap.indent(shown_examples, " " * 6, lambda line: True),
        "reward": _NUMBER if numbers else f"    - class_path: {name}.task.Right\n      init_args:\n",
        "completion": completion,
        "lr": f"{peak_rate(parameters, kind):.1e}",
        "rate_of": f"{parameters / 1e6:.3g}M parameters, {kind}",
    }


def _examples(problems: list[Problem], source: PromptSource) -> list[Example]:
    """The shortest questions, with the work written out where the source knows any."""
    few = sorted(problems, key=lambda problem: len(problem.question))[:EXAMPLES]
    return [Example(question=problem.question, completion=_demonstration(problem, source)) for problem in few]


def _demonstration(problem: Problem, source: PromptSource) -> str:
    """The longest of some: with its work."""
    shown = [source.demonstration(problem, random.Random(row_key("new", problem.id, n))) for n in range(8)]
    known = [text for text in shown if text is not None]
    if not known:
        raise ValueError(f"{problem.question[:60]!r} has no answer, so nothing to show the policy as an example.")
    return max(known, key=len)


_LORA = """    lora:  # low-rank adapters are trained, and all else is frozen; leave `lora` out to train all weights
      rank: 16
      alpha: 32.0
"""
_NUMBER = """    - class_path: grpo_pl.rewards.MathReward
      init_args:
        answer_in: last_number  # wherever it stands; `Right` of task.py reads <answer> only
"""
