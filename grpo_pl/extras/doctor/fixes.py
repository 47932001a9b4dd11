"""YAML to paste for a pretrained policy that does not come to its answers, filled in from the run's own data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

import yaml

import grpo_pl.rewards
from grpo_pl.data.sources import PromptSource
from grpo_pl.extras.doctor.answers import FORMS, scored_texts
from grpo_pl.extras.doctor.run_statistics import Finding
from grpo_pl.functional.sampling import row_key
from grpo_pl.policy.loading import context_length, model_config
from grpo_pl.rewards.answer_reading import AnswerReward, is_plain_number
from grpo_pl.rewards.base import Reward, correctness_index
from grpo_pl.rewards.format import FormatReward, format_failures
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import Problem

MENDED = frozenset({"D10", "D11", "D12"})
"""Findings that end in YAML."""
EXAMPLES = 2
COLD_STEPS, COLD_BATCH = 50, 8
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>")
"""Tokens that end a turn or a text in common models."""


def with_fixes(
    found: Sequence[Finding], module: GRPOModule, problems: Sequence[Problem], source: PromptSource
) -> list[Finding]:
    """The findings; of a pretrained policy those in ``MENDED`` with YAML that may mend them."""
    if module.policy_config.path is None or module.pool is not None or MENDED.isdisjoint(one.code for one in found):
        return list(found)
    examples = solved_examples(module, problems, source)
    template = {"template": {"examples": examples}} if examples and not module.template.examples else {}
    fixes = {}
    for code in MENDED.intersection(one.code for one in found):
        if code == "D10":  # a limit twice as high, as far as the context goes; short answers to imitate
            context = context_length(model_config(module.policy_config, module.tokenizer))
            length = module.sampling.max_completion_length
            longer = 2 * length if context is None else max(length, min(2 * length, context // 2))
            sampling = {"sampling": {"max_completion_length": longer}} if longer > length else {}
            fixes[code] = _yaml({**sampling, **template})
        elif code == "D11":  # examples of the form, rewards that read or pay more of it; in a comment a cold start
            tree = {**template, **_rewards(module, examples, problems)}
            cold = "" if module.cold_start is not None else _cold_start(problems, source)
            fixes[code] = "\n".join(filter(None, [_yaml(tree) if tree else "", cold]))
        else:  # end tokens that the tokenizer knows besides its own, else a blank line as the end
            known = module.tokenizer.get_vocab()
            ids = sorted(known[token] for token in _ENDS if token in known and token != module.tokenizer.eos_token)
            stop: dict[str, Any] = {"stop_token_ids": ids} if ids else {"stop": ["\n\n"]}
            fixes[code] = _yaml({"sampling": stop, **template})
    return [replace(one, fix=fixes[one.code]) if one.code in fixes else one for one in found]


def solved_examples(module: GRPOModule, problems: Sequence[Problem], source: PromptSource) -> list[dict[str, str]]:
    """Solved problems for ``template.examples``, each a text that the correctness reward finds right: the source's own
    demonstration, or the gold answer in the first form that is taken. Empty where none is."""
    known = sorted((problem for problem in problems[:64] if problem.answer), key=lambda one: len(one.question))
    few = known[:EXAMPLES]
    if len(few) < EXAMPLES or correctness_index(module.rewards) is None:
        return []
    prefill = module.template.prefill
    shown = [source.demonstration(problem, random.Random(row_key("fix", problem.id))) for problem in few]
    forms = [[prefill + form.format(gold=problem.answer) for form in FORMS] for problem in few]
    texts = [[own if own is not None else "", *row] for own, row in zip(shown, forms, strict=True)]
    judged = scored_texts(module, few, texts).judged()
    width = len(texts[0])
    for form in range(width):
        if all(judged[number * width + form].correct for number in range(EXAMPLES)):
            return [
                {"question": problem.question, "completion": row[form]} for problem, row in zip(few, texts, strict=True)
            ]
    return []


def _rewards(module: GRPOModule, examples: list[dict[str, str]], problems: Sequence[Problem]) -> dict[str, Any]:
    """All rewards again, as a list is replaced as a whole: boxes that nobody writes give way to the last number where
    that is what answers are, and the form is paid for in parts."""
    try:
        specs = [_short_spec(reward) for reward in module.rewards]
    except TypeError:  # a reward that cannot be described
        return {}
    before = [dict(spec["init_args"]) for spec in specs]
    numbers = all(is_plain_number(problem.answer) for problem in problems[:64])
    form = None
    for reward, spec in zip(module.rewards, specs, strict=True):
        if isinstance(reward, AnswerReward) and reward.correctness and reward.answer_in == "box" and numbers:
            spec["init_args"]["answer_in"] = "last_number"
        if isinstance(reward, FormatReward):
            form = reward
            spec["init_args"]["partial"] = True
    shown = examples[0]["completion"] if examples else ""
    boxed = "\\boxed{" in shown
    if form is None and shown and not format_failures(shown, require_box=boxed, allow_text=True):
        arguments = {"weight": 0.1, "partial": True, "require_box": boxed, "allow_text": True}
        specs.append({"class_path": "grpo_pl.rewards.FormatReward", "init_args": arguments})
    return {} if [spec["init_args"] for spec in specs] == before else {"rewards": specs}


def _short_spec(reward: Reward) -> dict[str, Any]:
    """``spec`` without the arguments that are the defaults."""
    spec, kind = reward.spec(), type(reward)
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(reward)}
    arguments = {
        name: value for name, value in spec["init_args"].items() if value != defaults.get(name) or name == "correctness"
    }
    public = getattr(grpo_pl.rewards, kind.__name__, None) is kind
    return {"class_path": f"grpo_pl.rewards.{kind.__name__}" if public else spec["class_path"], "init_args": arguments}


def _cold_start(problems: Sequence[Problem], source: PromptSource) -> str:
    """As comments: it takes the place of the examples, and time before the first rollout."""
    own = bool(problems) and source.demonstration(problems[0], random.Random(0)) is not None
    cold: dict[str, Any] = {"steps": COLD_STEPS, "batch_size": COLD_BATCH}
    told = f"# Or, instead of examples, a cold start on {COLD_STEPS * COLD_BATCH} demonstrations"
    if own:
        told += " of the data set:"
    else:
        cold["demonstrations"] = "solved.jsonl"
        told += ', lines of {"prompt": …, "completion": …}:'
    return "\n".join([told, *(f"# {line}" for line in _yaml({"cold_start": cold}).splitlines())])


def _yaml(model: dict[str, Any]) -> str:
    return yaml.safe_dump({"model": model}, sort_keys=False, allow_unicode=True, width=10**6).rstrip()
