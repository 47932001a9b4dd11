"""CHORD: each optimiser step is one on the objective and on demonstrations, in the shares that are asked for."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.chord import CHORD
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.training.beside import Beside
from grpo_pl.training.demonstrated import Demonstrated, DemonstrationBatches
from grpo_pl.training.experience import Experience
from grpo_pl.training.sft import Example
from grpo_pl.types import Problem, PromptBatch
from tests import gradient_step

BATCH = PromptBatch(step=3, prompts=[Problem(id=i, question="?" * i, answer="7") for i in (1, 2)], valid=[True] * 2)
TEXTS = {1: ["7", "77", "712345"], 2: ["55", "7", "5"]}
TERM = CHORD(coef=0.3)
PLAIN = GRPOAlgorithm(group_size=3, beta=0.0)
LEARNING = replace(PLAIN, terms={"chord": TERM})


@dataclass(kw_only=True)
class Same(Reward):
    """1 for the gold answer alone."""

    name: str = "same"

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Any) -> list[Score]:
        return [Score.of(float(text == answer)) for text, answer in zip(completions, answers, strict=True)]


@pytest.fixture
def experience(make_experience: Callable[..., Experience]) -> Experience:
    rewards = [Same(correctness=True)]
    return make_experience(TEXTS, batch=BATCH, rewards=rewards, algorithm=LEARNING, max_completion_length=6)


def _examples(tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    shown = [("1+1=", "2"), ("12+3=", "fifteen"), ("4=", "4!"), ("5", "555"), ("6+6+6=", "18")]
    eos = int(tokenizer.eos_token_id)
    pairs = [(tokenizer(asked).input_ids, [*tokenizer(said).input_ids, eos]) for asked, said in shown]
    return [Example(prompt, ids, [True] * len(ids)) for prompt, ids in pairs]


@pytest.mark.parametrize("weighting", ["equal", "uncertain"])
@pytest.mark.parametrize("max_tokens", [30, 1000])
def test_a_step_is_the_sum_of_both_losses_in_their_shares(
    experience: Experience,
    tiny_policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weighting: Any,
    max_tokens: int,
) -> None:
    """The demonstrations by a loop over their tokens, without padding and micro-batches."""
    examples, total, count, nll = _examples(tokenizer), torch.zeros(()), 0, 0.0
    for prompt, completion, _, _ in examples:
        logits = tiny_policy(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 :]
        for row, token in zip(logits, completion, strict=False):
            logprob = row.log_softmax(-1)[token]
            p = float(logprob.detach().exp())
            total = total - (1.0 if weighting == "equal" else p * (1 - p)) * logprob
            count, nll = count + 1, nll - float(logprob.detach())
    shown = gradient_step.gradient(total / count, tiny_policy)
    beside = Demonstrated(examples=examples, share=0.3, how=replace(TERM, weighting=weighting))
    moved, result = gradient_step.moved(tiny_policy, experience, PLAIN, beside, longest=6, max_tokens=max_tokens)
    alone, of_rewards = gradient_step.moved(tiny_policy, experience, PLAIN, longest=6)
    assert gradient_step.relative(moved, 0.7 * alone - 0.3 * shown) < 1e-5
    assert result.losses == pytest.approx([0.7 * of_rewards.losses[0] + 0.3 * (total / count).item()], rel=1e-5)
    summed, tokens = result.sums["demonstration/nll"]
    assert (float(summed), int(tokens)) == (pytest.approx(nll, rel=1e-5), count)
    assert [float(value) for value in result.sums["demonstration/share"]] == [pytest.approx(0.3), 1.0]


def test_demonstrations_are_learned_from_where_no_completion_is(
    experience: Experience, tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    nothing = replace(experience, active=torch.zeros_like(experience.active))
    beside = Demonstrated(examples=_examples(tokenizer), share=0.3, how=TERM)
    moved, result = gradient_step.moved(tiny_policy, nothing, PLAIN, beside, longest=6)
    assert moved.any() and len(result.losses) == 1
    assert not gradient_step.moved(tiny_policy, nothing, PLAIN, longest=6)[0].any()


def test_a_share_of_0_is_no_demonstration_and_no_step(
    experience: Experience, tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    unshown = Demonstrated(examples=_examples(tokenizer), share=0.0, how=TERM)
    nothing = replace(experience, active=torch.zeros_like(experience.active))
    moved, result = gradient_step.moved(tiny_policy, nothing, PLAIN, unshown, longest=6)
    assert not moved.any() and result.losses == [] and float(result.sums["demonstration/share"][0]) == 0.0
    assert torch.equal(
        *(gradient_step.moved(tiny_policy, experience, PLAIN, each, longest=6)[0] for each in (unshown, Beside()))
    )


def test_processes_share_the_demonstrations_and_each_has_its_own_step(tokenizer: PreTrainedTokenizerBase) -> None:
    examples = _examples(tokenizer)
    shown = Demonstrated(examples=examples, share=0.5, how=TERM)
    halves = [shown.parts(1000, Collective(rank=rank, world=2)) for rank in (0, 1)]
    assert [example for half in halves for part in half for example in part] == examples[::2] + examples[1::2]
    assert [len(part) for part in shown.parts(26, Collective())] == [2, 2, 1]


def test_the_batch_of_a_step_follows_from_its_number(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source, dialogue = ArithmeticPrompts(digits=2), Dialogue(template=PromptTemplate(), tokenizer=tokenizer)
    file = tmp_path / "shown.jsonl"
    file.write_text("".join(json.dumps({"prompt": str(i), "completion": f"<{i}>"}) + "\n" for i in range(9)))
    for batches in (DemonstrationBatches(batch_size=4), DemonstrationBatches(batch_size=4, file=str(file))):
        first, again, later = (batches.examples(number, source, dialogue) for number in (5, 5, 6))
        assert first == again != later and len(first) == 4
        assert all(all(each.written) and each.completion[-1] == tokenizer.eos_token_id for each in first)
        batches.check(source, dialogue, in_environment=False)
        term = CHORD(coef=0.3, decay_rollouts=4)
        falling = replace(PLAIN, terms={"chord": term}, num_iterations=2)
        assert batches.of_step(3, 0, algorithm=falling, source=source, dialogue=dialogue).examples == later
        over = batches.of_step(4, 0, algorithm=falling, source=source, dialogue=dialogue)
        assert over == Demonstrated(examples=[], share=0.0, how=term)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        DemonstrationBatches(batch_size=0)


class Mute(ArithmeticPrompts):
    def demonstration(self, prompt: Problem, rng: random.Random) -> str | None:
        return None


class Accented(ArithmeticPrompts):
    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        return "é"


@pytest.mark.parametrize(
    ("source", "row", "line"),
    [
        (Mute(digits=1), None, r"^Mute has no demonstrations: name a file as model\.demonstrations\.file, or override"),
        (Accented(digits=1), None, r"^the vocabulary lacks 'é' \(U\+00E9\), in 500 of 500 demonstrations"),
        (Mute(digits=1), {"prompt": "1+1=", "completion": "½"}, r"^the vocabulary lacks '½' \(U\+00BD\), in 1 of 1"),
        (
            Mute(digits=1),
            {"messages": [{"role": role, "content": "1"} for role in ("user", "assistant") * 2]},
            r"shown\.jsonl holds episodes of several turns: set model\.environment\.$",
        ),
        (Mute(digits=1), {"prompt": "1+1=", "completion": "2"}, r"does not begin with the template's prefill 'So '"),
    ],
)
def test_what_a_run_cannot_learn_from_is_refused_before_it(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, source: ArithmeticPrompts, row: Any, line: str
) -> None:
    file = tmp_path / "shown.jsonl"
    file.write_text(json.dumps(row))
    batches = DemonstrationBatches(file=None if row is None else str(file))
    dialogue = Dialogue(template=PromptTemplate(prefill="So "), tokenizer=tokenizer)
    with pytest.raises(ValueError, match=line):
        batches.check(source, dialogue, in_environment=False)
    with pytest.raises(ValueError, match=r"^model\.demonstrations\.file: no such file: gone\.jsonl"):
        DemonstrationBatches(file="gone.jsonl").check(source, dialogue, in_environment=False)


def test_a_source_without_demonstrations_ends_a_run_before_its_start(command_line: Any) -> None:
    config = command_line.config(
        "mute",
        model__algorithm={"preset": "chord", "group_size": 4},
        model__demonstrations={"file": None},
        model__cold_start=None,
        data__source={"class_path": f"{__name__}.Mute", "init_args": {"digits": 1}},
    )
    refused = command_line("fit", "--config", config)
    assert refused.status == 1 and "Mute has no demonstrations: name a file as model.demonstrations.file" in refused.err
    assert not (command_line.runs / "mute").exists()
