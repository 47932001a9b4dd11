"""``grpo-pl filter``: keeps the training problems that a policy solves in some of its tries, with measured rates."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_pl.cli.answering import Answerer, load_answerer, training_problems
from grpo_pl.cli.commands import check_at_least
from grpo_pl.config.objects import ConfigArguments, settings
from grpo_pl.data.cells import is_multiple_choice, is_true_or_false, written_images
from grpo_pl.data.image_limits import ImageLimits
from grpo_pl.files.rows import Row, append_rows, check_output, resume_rows, row_writer
from grpo_pl.rewards.base import require_correctness

if TYPE_CHECKING:
    from grpo_pl.config.objects import Config
    from grpo_pl.data.datamodule import RolloutDataModule
    from grpo_pl.types import Problem

RATE = "pass_rate"
"""Column that the written problems have besides those they came with."""
_RANGE = re.compile(r"\s*(\d*\.?\d+)\s*\.\.\s*(\d*\.?\d+)\s*")


def filter(
    config: ConfigArguments = None,
    model: str | None = None,
    output: str = "filtered.jsonl",
    keep: str = "0.1..0.9",
    samples: int = 8,
    prompts: int | None = None,
    drop_multiple_choice: bool = False,
    drop_true_false: bool = False,
    seed: int = 0,
    batch_size: int = 256,
    device: str = "auto",
    trust_rewards: bool = False,
) -> None:
    """Answers every training problem a few times and keeps those whose share of right answers lies in a range.

    A problem that is always or never solved teaches nothing. The kept ones are written as JSONL with the columns
    question, answer and pass_rate, for TablePrompts or JsonLinesPrompts. Measured rates are written at
    once to a file beside the output; after an interruption the same command continues from it.

    Args:
        config: configuration with the problems (data.source) and, unless --model is given, the policy (model).
        model: exported folder, run folder or checkpoint to measure with instead of the configuration's policy.
        output: file to write; it appears when it is complete.
        keep: least and largest share of right answers, such as 0.1..0.9; both ends count.
        samples: completions per problem; 0 measures nothing and applies the rules only.
        prompts: how many different problems to look at; by default all where there is a list of them, else 1000.
        drop_multiple_choice: leave out problems that list options and ask for a letter.
        drop_true_false: leave out problems whose answer is yes or no, true or false.
        seed: names the samples.
        batch_size: completions decoded at once.
        device: cpu, cuda …; auto takes a GPU where there is one.
        trust_rewards: let the model name any class as a reward, such as functions and judges: only if you know who
            wrote it. Without it such a model is refused.
    """
    if config is None:
        raise ValueError("--config is missing: give a configuration with data.source.")
    check_at_least(0, samples=samples)
    check_at_least(1, batch_size=batch_size, prompts=prompts)
    low, high = read_range(keep)
    given = settings(config, "data", "model")
    from grpo_pl.data.datamodule import RolloutDataModule
    from grpo_pl.policy.loading import choose_device
    from grpo_pl.policy.trained import find_model

    data = given.build("data", RolloutDataModule)
    source = data.source
    read = [getattr(leaf, name, None) for leaf in source.leaves().values() for name in ("path", "val_path")]
    check_output(Path(output), *(Path(path) for path in read if path))
    listed = source.problems("train")  # perhaps more than fit into memory: read again rather than kept
    problems = training_problems(source, 1000 if prompts is None else prompts) if listed is None else listed[:prompts]
    asked = {
        p.id
        for p in problems
        if not (drop_multiple_choice and is_multiple_choice(p.question, p.answer))
        and not (drop_true_false and is_true_or_false(p.answer))
    }
    if len(asked) < len(problems):
        print(f"{len(problems) - len(asked)} of {len(problems)} problems left out by rule")
    measured = None
    if samples:
        trained = None if model is None else find_model(Path(model), trust_rewards=trust_rewards)
        version = None if trained is None else trained.version
        conditions = (given.trees, given.options, data.digests(), version)
        measured = _RateFile(Path(output), conditions, [model, samples, seed])
        todo = asked - measured.rates.keys()
        if len(todo) < len(asked):
            print(f"{len(asked) - len(todo)} problems were measured before ({measured.path})")
        if todo and trained is not None:
            answerer = load_answerer(trained, device)
        elif todo:
            answerer = _configured(given, data, choose_device(device))
        if todo:
            _measure(answerer, problems, todo, measured, samples=samples, seed=seed, batch_size=batch_size)
    rates = {} if measured is None else measured.rates
    kept, largest = 0, 0
    with row_writer(Path(output)) as write:
        for prompt in problems:
            rate = rates.get(prompt.id)
            if prompt.id in asked and (not samples or (rate is not None and low <= rate <= high)):
                shown = {RATE: rate} if samples else {}
                images = written_images(prompt)
                if images:
                    largest = max(largest, *(len(image.png) for image in prompt.columns["images"]))
                write({"question": prompt.asked, "answer": prompt.answer, **prompt.columns, **images, **shown})
                kept += 1
        if not kept:
            raise ValueError(f"no problem is left of {len(problems)}: {_spread(rates)}. Widen --keep {keep}.")
    if measured is not None:
        measured.path.unlink(missing_ok=True)
        if measured.unjudged:
            print(f"{measured.unjudged} completions could not be judged: they count neither as right nor as wrong")
    print(f"{kept} of {len(problems)} problems kept ({_spread(rates)}), written to {output}")
    if hasattr(source, "kept"):
        options = " ".join([*(f"--config {file}" for file in given.files), *given.options])
        print(f"next        grpo-pl fit {options} --data.source.init_args.kept {output}")
    if largest > ImageLimits().megabytes * 1e6:
        needed = math.ceil(largest / 1e6)
        print(f"images      {output} as data of its own needs data.source.images.megabytes: {needed}, as PNG is large")


def read_range(text: str) -> tuple[float, float]:
    """``0.1..0.9`` as two numbers."""
    found = _RANGE.fullmatch(text)
    low, high = (float(found[1]), float(found[2])) if found else (math.nan, math.nan)
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"--keep must be a range such as 0.1..0.9, got {text!r}.")
    return low, high


class _RateFile:
    """A file of the rates measured so far, one line each; valid for one configuration with its data and weights
    (``conditions``), and for what it was ``measured_with``."""

    def __init__(self, output: Path, conditions: object, measured_with: Sequence[Any]) -> None:
        self.path = output.with_name(f"{output.name}.measured")
        self.rates: dict[int, float | None] = {}
        self.unjudged = 0
        """Completions that could not be judged; no rate includes them."""
        digest = hashlib.sha256(repr(conditions).encode()).hexdigest()[:16]
        header = {"measured_with": [digest, *measured_with]}
        before = resume_rows(self.path)
        if before and before[0] != header:
            raise ValueError(
                f"{self.path} holds rates of another configuration, data, model, --samples or --seed: "
                "delete it, or choose another --output."
            )
        self._unwritten = [] if before else [header]
        for row in before[1:]:
            self._count(row)

    def add(self, measured: Mapping[int, tuple[float | None, int]]) -> None:
        """Writes the rate of each problem, and the number of its completions that could not be judged."""
        rows = [{"id": id_, RATE: rate, "unjudged": unjudged} for id_, (rate, unjudged) in measured.items()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_rows(self.path, [*self._unwritten, *rows])
        self._unwritten = []
        for row in rows:
            self._count(row)

    def _count(self, row: Row) -> None:
        self.rates[row["id"]] = row[RATE]
        self.unjudged += row["unjudged"]


def _measure(
    answerer: Answerer,
    problems: Sequence[Problem],
    todo: set[int],
    measured: _RateFile,
    *,
    samples: int,
    **drawing: int,
) -> None:
    """Measures the rates of the problems of ``todo``; those without room for a completion get none."""
    import torch

    from grpo_pl.evaluation.metrics import pass_rates

    if long := answerer.too_long((p for p in problems if p.id in todo), len(todo)):
        measured.add(dict.fromkeys(long, (None, 0)))
        todo = todo - long
    judge = replace(answerer, rewards=[answerer.rewards[require_correctness(answerer.rewards, "filter")]])
    asked = (p for p in problems if p.id in todo)
    with closing(judge.answers("filter", asked, len(todo), samples=samples, **drawing)) as batches:
        for drawn, scored in batches:
            correct = scored.correct()
            groups = [correct[i : i + samples] for i in range(0, len(correct), samples)]
            values = torch.tensor([[math.nan if c is None else float(c) for c in group] for group in groups])
            rates = zip(drawn.prompts, groups, pass_rates(values), strict=True)
            measured.add({problem.id: (rate, group.count(None)) for problem, group, rate in rates})


def _configured(given: Config, data: RolloutDataModule, device: str) -> Answerer:
    """The policy that ``fit`` with this configuration would start from, its cold start included."""
    import torch
    from lightning.pytorch import Trainer

    from grpo_pl.policy.loading import load_model, load_tokenizer
    from grpo_pl.policy.quiet import quiet_libraries
    from grpo_pl.training.cold_start_fit import make_start
    from grpo_pl.training.module import GRPOModule
    from grpo_pl.training.vocabulary import with_collected_characters

    if "model" not in given:
        raise ValueError(f"{' and '.join(given.files)} has no model: name the policy there, or give --model.")
    module = given.build("model", GRPOModule)
    quiet_libraries()
    module.derive_defaults(data)
    policy = with_collected_characters(
        module.policy_config, module.template, data, module.cold_start, module.stage, module.demonstrations
    )
    tokenizer, path = load_tokenizer(policy), None
    if module.cold_start is not None:
        place = torch.device(device)
        one = Trainer(accelerator=place.type, devices=1 if place.index is None else [place.index], logger=False)
        path = str(make_start(module.cold_start, policy, module.template, data.source, module.stage, trainer=one))
    module.policy = load_model(policy, tokenizer, path).to(device).eval()  # type: ignore[arg-type]
    module.tokenizer = tokenizer
    return Answerer(sampler=module.sampler, model=module.policy, sampling=module.sampling, rewards=module.rewards)


def _spread(rates: Mapping[int, float | None]) -> str:
    measured = [rate for rate in rates.values() if rate is not None]
    if not measured:
        return "nothing measured"
    never, always = sum(r == 0.0 for r in measured), sum(r == 1.0 for r in measured)
    unknown = len(rates) - len(measured)
    return (
        f"mean pass rate {sum(measured) / len(measured):.3f}, {never} never solved, {always} always"
        f"{f', {unknown} could not be judged' if unknown else ''}"
    )
