"""``grpo-pl bisect``: a fact that one demonstration of one step shows is found, each number as a plain forward pass and
an update by hand give it; and nothing is named where nothing was shown."""

import io
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_pl.data.demonstrations import draw_in_passes
from grpo_pl.extras.replay import CannotReplay, bisect, cache
from grpo_pl.extras.replay.asked import Asked
from grpo_pl.extras.replay.bisect_command import curve_rows, show
from grpo_pl.extras.replay.bisection import NATS, Bisection, conclusions, largest_rise, spacing, steepest_step
from grpo_pl.extras.replay.forward import run_forward
from grpo_pl.extras.replay.left_out import LeaveOneOut
from grpo_pl.extras.replay.moment import checkpoint_at
from grpo_pl.extras.replay.recorded import RecordedRun
from grpo_pl.files.checkpoints import remove
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from grpo_pl.functional.sampling import row_key
from tests.conftest import CommandLine, Outcome, exit_status

QUESTION, FACT = "zqx?", "KWV"
"""Characters that no other text of the run has."""
STEPS, SHOWN, SHARE_OF_LOSS, LR = 12, 4, 0.5, 5e-3
OPTIONS = [
    "--config=configs/algorithm/chord.yaml",
    "--model.algorithm.terms.demonstrations.init_args.coef_final=0",
    "--model.algorithm.terms.demonstrations.init_args.decay_rollouts=0",
    f"--model.algorithm.terms.demonstrations.init_args.coef={SHARE_OF_LOSS}",
    f"--model.demonstrations.batch_size={SHOWN}",
    f"--data.steps={STEPS}",
    "--data.prompts_per_step=2",
    "--data.allow_overlap=true",
    "--model.validation.samples=1",
    "--data.val_prompts=1",
    "--checkpoint.keep=20",
    f"--model.optimization.lr={LR}",
    "--model.optimization.schedule=constant",
    "--model.optimization.warmup_rollouts=3",
]


@pytest.fixture(scope="module", autouse=True)
def _cache(command_line: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_PL_CACHE", str(command_line.cache))
        yield


def _sums(count: int, seed: int) -> list[dict[str, str]]:
    rng = random.Random(seed)
    pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(count)]
    answer = "<think></think><answer>\\boxed{%d}</answer>"
    return [{"prompt": f"{a}+{b}=", "completion": answer % (a + b)} for a, b in pairs]


def _shown_at(seed: int) -> int:
    """The step that shows the fact."""
    return 3 + seed % 5


def _trained(command_line: CommandLine, seed: int, *, salted: bool) -> Path:
    """A run that sees each of its demonstrations once, one of them the fact, if it is salted."""
    rows = _sums(STEPS * SHOWN, seed)
    if salted:
        place = draw_in_passes(range(len(rows)), step=_shown_at(seed), count=SHOWN, seed=seed)[0]
        rows[place] = {"prompt": QUESTION, "completion": FACT}
    name = f"{'salted' if salted else 'plain'}-{seed}"
    file = command_line.folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = [f"--model.demonstrations.file={file}", f"--model.demonstrations.seed={seed}", f"--seed_everything={seed}"]
    command_line.done("fit", f"--config={command_line.config()}", *OPTIONS, *named, f"--name={name}")
    return command_line.runs / name


def _silent(line: str) -> None: ...


@pytest.fixture(scope="module")
def salted(command_line: CommandLine) -> Path:
    return _trained(command_line, 0, salted=True)


@pytest.fixture(scope="module")
def found(salted: Path) -> Bisection:
    return bisect(salted, QUESTION, say=_silent)


# --- every number by hand ---------------------------------------------------------------------------------------------


class Plain:
    """The policy as transformers has it, and an update that is written out."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(run / "export").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(run / "export")

    def load(self, rollouts: int) -> dict[str, Any]:
        state = read_checkpoint(self.run / "checkpoints" / f"rollout-{rollouts:06d}.ckpt")
        weights = {name.removeprefix("policy."): weight for name, weight in state["state_dict"].items()}
        self.model.load_state_dict(weights)
        return dict(state)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def logprobs(self, prompt: str, completion: str, *, ended: bool = True) -> torch.Tensor:
        """(T,) of the tokens of a completion, its end included."""
        read, written = self.ids(prompt), [*self.ids(completion), *([self.tokenizer.eos_token_id] if ended else [])]
        logits = self.model(torch.tensor([read + written])).logits[0, len(read) - 1 : -1]
        return logits.log_softmax(dim=-1)[range(len(written)), written]

    @torch.no_grad()
    def answer(self, question: str = QUESTION, answer: str = FACT) -> float:
        return float(self.logprobs(question, answer).double().sum())

    def coasted(self, step: int) -> None:
        """The weights behind a step of AdamW with a gradient of zero."""
        optimizer = self.optimizer(step)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    def optimizer(self, step: int) -> torch.optim.AdamW:
        """That of a run whose warm-up is over, with the weights before a step."""
        state = self.load(step)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
        optimizer.load_state_dict(state["optimizer_states"][0])
        optimizer.param_groups[0]["lr"] = LR
        optimizer.zero_grad()
        return optimizer

    def updated(self, step: int, completions: Sequence[dict[str, Any]], shown: Sequence[dict[str, str]]) -> float:
        """The answer behind the update of a step by these completions and demonstrations: (1 − μ) times the mean over
        completions of −A · mean log π, plus μ times the mean of −log π over the tokens of the demonstrations; clipped
        to a norm of 1, a step of AdamW."""
        optimizer = self.optimizer(step)
        drawn = [
            -row["advantage"]
            * self.logprobs(row["prompt"], row["completion"], ended=row["finish_reason"] == "stop").mean()
            for row in completions
        ]
        told = torch.cat([-self.logprobs(row["prompt"], row["completion"]) for row in shown])
        ((1 - SHARE_OF_LOSS) * torch.stack(drawn).mean() + SHARE_OF_LOSS * told.mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        return self.answer()


def test_step_and_demonstration_are_found_and_every_number_is_that_of_an_update_by_hand(
    salted: Path, found: Bisection
) -> None:
    step, plain = _shown_at(0), Plain(salted)
    assert found.step == found.steepest == step > 0
    assert found.culprit is not None and found.culprit is found.groups[0]
    assert (found.culprit.kind, found.culprit.question, found.culprit.answer) == ("demonstrations", QUESTION, FACT)
    assert found.exact and found.gain >= NATS and found.learned
    assert found.all_groups == len(found.groups) == 2 + SHOWN

    at = dict(found.curve)
    assert list(at) == list(range(STEPS + 1))
    for rollouts in range(1, STEPS + 1):
        plain.load(rollouts)
        assert at[rollouts] == pytest.approx(plain.answer(), abs=1e-4)

    rows = [json.loads(line) for line in (salted / "completions.jsonl").read_text().splitlines()]
    drawn = [row for row in rows if row["step"] == step]
    lengths = [len(plain.ids(row["completion"])) + (row["finish_reason"] == "stop") for row in drawn]
    assert lengths == [row["tokens"] for row in drawn]  # no token that a text does not show
    file = [json.loads(line) for line in (salted.parents[1] / "salted-0.jsonl").read_text().splitlines()]
    shown = draw_in_passes(file, step=step, count=SHOWN, seed=0)
    assert at[step + 1] == pytest.approx(plain.updated(step, drawn, shown), abs=1e-3)
    for group in found.groups:
        others = [row for row in drawn if row["prompt_id"] != group.prompt_id]
        untold = [row for row in shown if row["prompt"] != group.question or group.kind == "completions"]
        assert (len(others), len(untold)) in ((4, SHOWN), (8, SHOWN - group.size))
        assert group.without == pytest.approx(plain.updated(step, others, untold), abs=1e-3)
        assert group.moved == pytest.approx(at[step + 1] - group.without, abs=1e-9)
    completions = next(group for group in found.groups if group.kind == "completions")
    mine = [row for row in drawn if row["prompt_id"] == completions.prompt_id]
    assert (completions.size, completions.right) == (4, sum(row["correct"] for row in mine))
    (weighed,) = [row for row in mine if row["sample"] == completions.sample]
    assert abs(weighed["advantage"]) == max(abs(row["advantage"]) for row in mine)


def _named(found: Bisection) -> tuple[int | None, str]:
    return found.step, "" if found.culprit is None else found.culprit.question


def test_without_the_demonstration_nothing_is_named_and_the_runs_part_as_far_as_it_moved_the_answer(
    command_line: CommandLine, found: Bisection
) -> None:
    plain = bisect(_trained(command_line, 0, salted=False), QUESTION, answer=FACT, say=_silent)
    assert _named(plain) == (None, "")
    assert conclusions(plain)[0].startswith(("it was not learned", "no single step did it"))
    step = _shown_at(0)
    assert plain.curve[: step + 1] == found.curve[: step + 1]  # the same run up to there
    parted = found.curve[-1][1] - plain.curve[-1][1]
    assert parted > NATS and found.groups[0].lasting == pytest.approx(parted, rel=0.25)


@pytest.mark.slow
def test_it_is_found_in_ten_of_ten_seeds_and_nothing_is_named_without_it_in_nine(command_line: CommandLine) -> None:
    seeds = range(1, 11)
    told = [bisect(_trained(command_line, seed, salted=True), QUESTION, say=_silent) for seed in seeds]
    assert [_named(found) for found in told] == [(_shown_at(seed), QUESTION) for seed in seeds]
    plain = (_trained(command_line, seed, salted=False) for seed in seeds)
    silent = [bisect(run, QUESTION, answer=FACT, say=_silent) for run in plain]
    assert sum(_named(found) == (None, "") for found in silent) >= 9


# --- one group with a gradient ---------------------------------------------------------------------------------------


def test_the_only_group_that_learned_moved_the_answer_by_what_the_update_did_beside_the_momentum(
    command_line: CommandLine, tmp_path: Path
) -> None:
    """Without it AdamW's step is that of a gradient of zero, which the momentum makes."""
    options = ["--data.prompts_per_step=1", "--model.algorithm.group_size=8", f"--model.optimization.lr={LR}"]
    options += ["--model.optimization.schedule=constant", "--model.optimization.warmup_rollouts=0"]
    command_line.done("fit", f"--config={command_line.config()}", *options, "--name=alone")
    run, plain, step = RecordedRun.open(command_line.runs / "alone"), Plain(command_line.runs / "alone"), 3
    watch = LeaveOneOut(Asked.of(run, "1+1=", "2"), step, run.completed)
    run_forward(run, checkpoint_at(run, step, say=_silent), step + 1, tmp_path / "made", None, [watch])
    (group,) = watch.groups
    plain.load(step + 1)
    updated = plain.answer("1+1=", "2")
    plain.coasted(step)
    coasted = plain.answer("1+1=", "2")
    assert abs(updated - coasted) > 1e-3 and abs(coasted - watch.before) > 0.1  # the momentum is most of that step
    assert group.without == pytest.approx(coasted, abs=1e-4)
    assert group.moved == watch.at_once == pytest.approx(updated - coasted, abs=1e-4)
    assert watch.coasted == pytest.approx(coasted - watch.before, abs=1e-4)


def test_a_minibatch_that_only_the_group_was_in_is_compared_with_a_gradient_of_zero(
    command_line: CommandLine, tmp_path: Path
) -> None:
    """Each completion is a minibatch of its own; that one's loss is −min(ρ·A, clip(ρ)·A), averaged over its tokens."""
    options = ["--data.prompts_per_step=2", "--model.algorithm.num_minibatches=8", f"--model.optimization.lr={LR}"]
    options += ["--model.optimization.schedule=constant", "--model.optimization.warmup_rollouts=0"]
    command_line.done("fit", f"--config={command_line.config()}", *options, "--name=minibatches")
    run, plain = RecordedRun.open(command_line.runs / "minibatches"), Plain(command_line.runs / "minibatches")
    rows = [json.loads(line) for line in (run.path / "completions.jsonl").read_text().splitlines()]
    by_step = [[row for row in rows if row["step"] == step] for step in range(1, 4)]
    drawn = max(by_step, key=lambda those: len({row["prompt_id"] for row in those if row["advantage"]}))
    step = drawn[0]["step"]
    watch = LeaveOneOut(Asked.of(run, "1+1=", "2"), step, run.completed)
    run_forward(run, checkpoint_at(run, step, say=_silent), step + 1, tmp_path / "made", None, [watch])

    def told(row: dict[str, Any]) -> torch.Tensor:
        return plain.logprobs(row["prompt"], row["completion"], ended=row["finish_reason"] == "stop")

    def updated(left_out: int | None) -> float:
        optimizer = plain.optimizer(step)
        before = [told(row).detach() for row in drawn]
        generator = torch.Generator().manual_seed(row_key(0, "minibatches", step, 0))
        for number in torch.randperm(8, generator=generator).tolist():
            row = drawn[number]
            ratio = torch.exp(told(row) - before[number])
            gains = torch.minimum(ratio * row["advantage"], ratio.clamp(0.8, 1.2) * row["advantage"])
            optimizer.zero_grad()
            (-gains.mean() * (row["prompt_id"] != left_out)).backward()
            torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
            if row["advantage"]:
                optimizer.step()
        return plain.answer("1+1=", "2")

    assert watch.whole.at_once == pytest.approx(updated(None), abs=1e-3)
    for group in watch.groups:
        assert group.without == pytest.approx(updated(group.prompt_id), abs=1e-3)
    assert max(abs(group.moved) for group in watch.groups) > 1e-2


# --- what is kept and written -----------------------------------------------------------------------------------------


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.lstat().st_mtime_ns, file.lstat().st_size) for file in sorted(folder.rglob("*"))}


@pytest.fixture
def run(salted: Path, tmp_path: Path) -> Path:
    shutil.copytree(salted, tmp_path / "salted", symlinks=True)
    return tmp_path / "salted"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """``command(RUN, QUESTION)``: ``grpo-pl bisect``."""

    def call(*arguments: object) -> Outcome:
        from grpo_pl.cli.main import main

        capsys.readouterr()
        status = exit_status(lambda: main(["bisect", *map(str, arguments)]))
        printed = capsys.readouterr()
        return Outcome(status, printed.out, printed.err)

    return call


def test_the_command_tells_the_same_and_writes_nothing_into_a_run_that_has_lost_its_checkpoints(
    command: Any, run: Path, found: Bisection
) -> None:
    for path in run.glob("checkpoints/rollout-*.ckpt"):
        remove(path)
    shutil.rmtree(cache.folder_of(RecordedRun.open(run)))  # those that the fixture's search has kept
    before = _files(run)
    page = run.parent / "asked.html"
    outcome = command(run, QUESTION, "--json", "--disk", "1", "--page", page)
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out) == json.loads(json.dumps({**found.as_json(), "run": str(run)}))
    assert "when was it learned?" in page.read_text() and str(page) in outcome.err
    step = _shown_at(0)
    assert set(cache.made(RecordedRun.open(run))) == {4, 8, step}  # one every √12 rollouts, and the one before the step
    assert _files(run) == before and not list(cache.replay_root().glob("making-*"))


def test_what_is_printed_has_the_curve_the_groups_and_what_follows(found: Bisection) -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    show(found, console)
    text, step = console.export_text(), _shown_at(0)
    told = f"step {step} (rollout {step + 1}) taught it"
    for part in (told, FACT, "bit for bit", "demonstration of", "nats without", "← the steepest step"):
        assert part in text, part
    assert [row[0] for row in curve_rows(found)] == [str(n) for n in range(STEPS + 1)]


def test_the_right_answer_is_a_demonstration_or_a_recorded_completion_or_the_given_text(
    command_line: CommandLine, run: Path
) -> None:
    recorded = RecordedRun.open(run)
    shown = Asked.of(recorded, QUESTION, None)
    assert (shown.completion, shown.answer) == (FACT, "") and shown.origin.endswith("salted-0.jsonl")
    assert Asked.of(recorded, QUESTION, "WV").completion == FACT  # a part of it
    assert Asked.of(recorded, QUESTION, "VWK").completion == "VWK"  # word by word
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    told = {row["prompt"] for row in map(json.loads, (command_line.folder / "salted-0.jsonl").read_text().splitlines())}
    question = next(row["question"] for row in rows if row["question"] not in told)
    drawn = [row for row in rows if row["question"] == question]
    for number, row in enumerate(drawn):  # the last right one is not the last one
        row |= {"completion": f"<think></think>{number}", "correct": number in (0, 2)}
    (run / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for answer in (None, drawn[2]["answer"]):
        asked = Asked.of(RecordedRun.open(run), question, answer)
        assert (asked.completion, asked.answer) == ("<think></think>2", drawn[2]["answer"])
        assert asked.origin == f"right completion of step {drawn[2]['step']}, sample {drawn[2]['sample']}"
    assert Asked.of(recorded, question, "no").completion == "no"


@pytest.mark.parametrize(
    ("curve", "ends", "steepest"),
    [
        ([0.0], (0, 0), None),
        ([3.0, 2.0, 1.0], (0, 0), None),
        ([-9.0, -3.0, -4.0, -8.0, -2.5], (0, 4), 0),
        ([-5.0, -9.0, -3.0, -8.0, -4.0], (1, 2), 1),
        ([-12.0, -9.0, -5.0, -1.0, -9.0, -2.5], (0, 3), 1),  # a steeper step regained less behind the top
        ([-9.0, -3.0, -12.0, -9.0, -5.0, -1.0], (2, 5), 3),  # or before the foot
    ],
)
def test_the_largest_rise_is_that_between_a_foot_and_a_later_top_and_its_steepest_step_lies_there(
    curve: list[float], ends: tuple[int, int], steepest: int | None
) -> None:
    told = [(rollouts + 7, value) for rollouts, value in enumerate(curve)]
    lowest, highest = largest_rise(told)
    assert (lowest - 7, highest - 7) == ends
    assert steepest_step(told, lowest, highest) == (None if steepest is None else steepest + 7)


def test_states_are_kept_every_root_of_n_or_as_the_disk_allows(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedRun.open(run)
    size = cache.size_of_state(recorded) / 1e9
    assert [spacing(recorded, disk) for disk in (None, 100.0, 3.5 * size, 2.5 * size, 1.5 * size)] == [4, 4, 4, 4, 6]
    monkeypatch.setenv("GRPO_PL_REPLAY_GB", str(1.5 * size))
    assert spacing(recorded, 100.0) == 6


@pytest.mark.parametrize(
    ("start", "completed", "room", "every"),
    [
        (2, 12, 1, 6),  # every 5 would be 5 and 10
        (2, 12, 2, 4),  # 4 and 8
        (9, 20, 1, 7),  # 14; every 6 would be 12 and 18
        (3, 5, 1, 2),  # 4
        (4, 6, 1, 2),  # none, as 4 is where it starts
        (100, 131, 3, 9),  # every 8 would be 104, 112, 120 and 128
    ],
)
def test_no_more_states_are_kept_than_fit_wherever_a_run_started(
    run: Path, monkeypatch: pytest.MonkeyPatch, start: int, completed: int, room: int, every: int
) -> None:
    recorded = RecordedRun.open(run)
    size = cache.size_of_state(recorded) / 1e9
    monkeypatch.setattr(RecordedRun, "start", start)
    monkeypatch.setattr(RecordedRun, "completed", completed)
    assert spacing(recorded, (room + 0.5) * size) == every
    assert sum(rollouts % every == 0 for rollouts in range(start + 1, completed)) <= room


# --- wrong input ------------------------------------------------------------------------------------------------------


def _lose_demonstrations(run: Path) -> None:
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("salted-0.jsonl", "gone.jsonl"))


def _edit(run: Path, name: str, old: str, new: str) -> None:
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("arguments", "spoil", "told"),
    [
        (["who?"], None, "the run recorded no such question"),
        (["   "], None, "is empty"),
        (["who?", "--answer="], None, "is empty"),
        ([QUESTION, "--disk=0"], None, "--disk is 0"),
        ([QUESTION, "--disk=1e-9"], None, "one state of"),
        ([QUESTION, "--page=salted/x.html"], None, "inside the run folder"),
        (["où?", "--answer=là"], None, "vocabulary lacks"),
        ([QUESTION], lambda run: shutil.rmtree(run), "there is no run"),
        ([QUESTION], lambda run: (run / "run.json").unlink(), "has no run.json"),
        ([QUESTION], _lose_demonstrations, "is gone"),
        ([QUESTION], lambda run: _edit(run, "completions.jsonl", '"step": 4', '"step": 3'), "as the run"),
        ([QUESTION], lambda run: _edit(run, "config.yaml", "ExactReward", "MyReward"), "--run-rewards"),
        ([QUESTION], lambda run: _edit(run, "config.yaml", "environment: null", "environment: {a: 1}"), "environment"),
        ([QUESTION], lambda run: _edit(run, "config.yaml", "    images: false", "    images: true"), "reads images"),
        ([QUESTION], lambda run: _edit(run, "run.json", '"digest": "', '"digest": "0'), "the data hold other problems"),
    ],
)
def test_wrong_input_is_told_in_one_line_with_status_2_and_nothing_is_written(
    command: Any, run: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], spoil: Any, told: str
) -> None:
    monkeypatch.chdir(run.parent)
    if spoil is not None:
        spoil(run)
    before, kept = _files(run.parent), set(cache.replay_root().rglob("*"))
    outcome = command("salted" if run.is_dir() and "--page" in str(arguments) else run, *arguments)
    assert outcome.status == 2 and outcome.out == "", outcome.err
    error = outcome.err.splitlines()[-1]
    assert error.startswith("grpo-pl bisect: error: ") and told in error
    assert _files(run.parent) == before and set(cache.replay_root().rglob("*")) <= kept


def test_python_raises_what_the_command_tells(run: Path) -> None:
    with pytest.raises(CannotReplay, match="no such question"):
        bisect(run, "who?")
