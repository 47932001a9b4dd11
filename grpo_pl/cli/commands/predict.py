"""``grpo-pl predict``: completions of a trained policy with their rewards, or only the right ones as demonstrations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_pl.cli.answering import load_answerer, training_problems
from grpo_pl.cli.commands import check_at_least
from grpo_pl.config.objects import ConfigArguments, settings
from grpo_pl.files.rows import row_writer
from grpo_pl.files.runs import RunFolder
from grpo_pl.policy.dialogue import messages_of, opening
from grpo_pl.rollout.sampler import episode_row
from grpo_pl.types import CUT_OFF

if TYPE_CHECKING:
    from grpo_pl.data.sources import PromptSource
    from grpo_pl.rewards.batch import ScoredBatch
    from grpo_pl.rollout.sampler import Samples
    from grpo_pl.types import Problem


def predict(
    model: str | None = None,
    output: str = "predictions.jsonl",
    split: Literal["train", "val"] = "val",
    prompts: int = 200,
    samples: int = 4,
    keep_correct: bool = False,
    config: ConfigArguments = None,
    temperature: float | None = None,
    max_completion_length: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
    device: str = "auto",
    trust_rewards: bool = False,
) -> None:
    """Answers problems with a trained policy and writes one JSON line per completion, with every reward.

    Lines are in the chat form that TRL and `model.cold_start.demonstrations` read: prompt and completion as messages.
    With --keep-correct only right completions are written, each text once per problem, and none that was cut off
    at the length limit: rejection sampling, for supervised fine-tuning afterwards.

    Args:
        model: exported folder, run folder or checkpoint.
        output: file to write; it appears when it is complete.
        split: train takes training problems in the order of the rollouts, val the held-out ones.
        prompts: how many different problems; fewer where the source has fewer.
        samples: completions per problem.
        keep_correct: write right completions only.
        config: configuration that names the problems (`data.source`); by default the run's own.
        temperature: of the completions; by default the one of training, 0 is greedy.
        max_completion_length: most tokens of a completion; by default the one of training.
        seed: names the samples.
        batch_size: completions decoded at once.
        device: cpu, cuda …; auto takes a GPU where there is one.
        trust_rewards: let the model name any class as a reward or a source, such as functions and judges: only if you
            know who wrote it. Without it such a model is refused.
    """
    if model is None:
        raise ValueError("--model is missing: give an exported folder, a run folder or a checkpoint.")
    check_at_least(1, prompts=prompts, samples=samples, batch_size=batch_size)
    check_at_least(1, max_completion_length=max_completion_length)
    from grpo_pl.data.sources import PromptSource
    from grpo_pl.policy.trained import find_model

    trained = find_model(Path(model), trust_rewards=trust_rewards)
    if config:
        source = settings(config, "data.source").build("data.source", PromptSource)
    else:
        source = _own_source(Path(model), trust=trust_rewards)
    problems = source.validation(prompts) if split == "val" else training_problems(source, prompts)
    drawing = {"temperature": temperature, "max_completion_length": max_completion_length}
    answerer = load_answerer(trained, device, **drawing)
    long = answerer.too_long(problems, len(problems))
    problems = [prompt for prompt in problems if prompt.id not in long]
    tally: Counter[str] = Counter()
    seen: set[tuple[int, str]] = set()
    answers = answerer.answers("predict", problems, len(problems), samples=samples, seed=seed, batch_size=batch_size)
    with row_writer(Path(output)) as write, closing(answers) as batches:
        for drawn, scored in batches:
            for row in completion_rows(drawn, scored):
                fate = _fate(row, seen) if keep_correct else "kept"
                tally[fate] += 1
                tally["correct"] += row["correct"] is True
                tally["judged"] += row["correct"] is not None
                if fate == "kept":
                    write(row)
        if not tally["kept"]:
            raise ValueError(f"nothing to write: of {len(problems) * samples} completions {_left_out(tally)}.")
    _report(tally, len(problems), samples, output)


def _own_source(model: Path, *, trust: bool) -> PromptSource:
    """The source that the run of ``model`` names; the run may be somebody else's, so not every class is imported."""
    from grpo_pl.data.sources import PromptSource
    from grpo_pl.rewards.trust import check_source_trusted

    folders = [model, model.absolute().parent, model.absolute().parent.parent]
    config = next((RunFolder(f).config for f in folders if RunFolder(f).config.is_file()), None)
    if config is None:
        raise ValueError(f"{model} lies in no run folder: name the problems with --config, a file with data.source.")
    run = settings(str(config), "data.source")
    if not trust:
        check_source_trusted(run.get("data.source"))
    return run.build("data.source", PromptSource)


def completion_rows(drawn: Samples, scored: ScoredBatch) -> Iterator[dict[str, Any]]:
    """One row per completion, in order: messages, gold answer, each reward with its status, and whether it is right."""
    totals, correct, lengths = scored.totals(), scored.correct(), drawn.rollout.action_lengths.tolist()
    for i, prompt in enumerate(drawn.per_row):
        asked = list(prompt.messages or [{"role": "user", "content": prompt.question}])
        said, played = [{"role": "assistant", "content": drawn.completions[i]}], {}
        if drawn.episodes is not None:
            played = {"episode": episode_row(drawn.episodes[i])}
            asked, said = exchange(prompt, played["episode"])
        yield {
            "prompt": asked,
            "completion": said,
            "answer": prompt.answer,
            "prompt_id": prompt.id,
            "sample": i % drawn.rollout.group_size,
            "reward": totals[i],
            "rewards": scored.described(i),
            "correct": correct[i],
            "tokens": lengths[i],
            "finish_reason": drawn.rollout.finish_reasons[i],
            **scored.extra_of(i),
            **played,
        }


def exchange(prompt: Problem, episode: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """The messages up to the first action of an episode, and those from it to the last action."""
    said: list[Any] = []
    for turn in episode["turns"]:
        said += [{"role": "assistant", "content": turn["action"]}, *messages_of(turn["observation"])]
    last = max((i for i, message in enumerate(said) if message["role"] == "assistant"), default=-1)
    asked = "" if "tools" in episode else prompt.asked  # an agent has written the whole prompt
    return list(messages_of(opening(asked, episode["observation"]))), said[: last + 1]


def _fate(row: dict[str, Any], seen: set[tuple[int, str]]) -> str:
    """``kept``, or the reason for which rejection sampling leaves a completion out."""
    if row["correct"] is None:
        return "not judged"
    if row["correct"] is not True:
        return "not correct"
    if row["finish_reason"] in CUT_OFF:
        return "cut off"
    if any(turn.get("segment") for turn in row.get("episode", {}).get("turns", ())):
        return "of several conversations"  # which are no single one to imitate
    text = (row["prompt_id"], json.dumps([row["prompt"], row["completion"]]))
    if text in seen:
        return "repeated"
    seen.add(text)
    return "kept"


def _report(tally: Counter[str], problems: int, samples: int, output: str) -> None:
    total = problems * samples
    share = f"{tally['correct'] / tally['judged']:.1%} correct" if tally["judged"] else "none could be judged"
    unjudged = f" of {tally['judged']} that could be judged" if 0 < tally["judged"] < total else ""
    print(f"{total} completions of {problems} problems, {share}{unjudged}")
    dropped = _left_out(tally)
    print(f"{tally['kept']} written to {output}" + (f"; left out: {dropped}" if dropped else ""))


def _left_out(tally: Counter[str]) -> str:
    reasons = ("not correct", "not judged", "cut off", "of several conversations", "repeated")
    return ", ".join(f"{tally[why]} {why}" for why in reasons if tally[why])
