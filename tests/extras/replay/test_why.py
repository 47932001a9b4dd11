"""``grpo-pl why``: every number of an explanation against a plain forward pass and an objective written by hand."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_pl.extras.replay import CannotReplay, Explanation, cache, why
from grpo_pl.files.checkpoints import policy_weights, remove
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import GenerateRequest, SampleKey, SamplingParams
from tests.conftest import Outcome, exit_status

LONGEST, EPSILON = 32, 0.003
OPTIONS = [
    "--model.algorithm.num_iterations=2",
    "--model.algorithm.num_minibatches=2",
    f"--model.algorithm.epsilon_low={EPSILON}",
    f"--model.algorithm.epsilon_high={EPSILON}",
    "--model.sampling.temperature=0.9",
    "--data.steps=5",
    "--model.algorithm.std_eps=1e-4",
]
"""Two passes of two optimiser steps over 16 completions, so that ratios leave 1 and are clipped."""


@pytest.fixture(scope="module", autouse=True)
def _cache(command_line: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_PL_CACHE", str(command_line.cache))
        yield


@pytest.fixture(scope="module")
def asked(command_line: Any) -> Path:
    """A tiny run of five rollouts with all of its checkpoints."""
    command_line.done("fit", f"--config={command_line.config()}", *OPTIONS, "--name=asked")
    return Path(command_line.runs / "asked")


@pytest.fixture
def run(asked: Path, tmp_path: Path) -> Path:
    shutil.copytree(asked, tmp_path / "asked", symlinks=True)
    return tmp_path / "asked"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """``command(RUN, "--completion=3")``: ``grpo-pl why``."""

    def call(*arguments: object) -> Outcome:
        from grpo_pl.cli.main import main

        capsys.readouterr()
        status = exit_status(lambda: main(["why", *map(str, arguments)]))
        printed = capsys.readouterr()
        return Outcome(status, printed.out, printed.err)

    return call


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]


def _uneven(run: Path, step: int) -> int:
    """The line of a completion of a step whose advantage is not 0."""
    return next(n for n, row in enumerate(_rows(run), start=1) if row["step"] == step and row["advantage"] < 0)


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.lstat().st_mtime_ns, file.lstat().st_size) for file in sorted(folder.rglob("*"))}


def _weights(run: Path, rollouts: int) -> dict[str, torch.Tensor]:
    return policy_weights(read_checkpoint(run / "checkpoints" / f"rollout-{rollouts:06d}.ckpt"))


class Plain:
    """The policy as transformers has it, with weights of the run's checkpoints."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(run / "export").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(run / "export")

    @torch.no_grad()
    def log_softmax(self, weights: dict[str, torch.Tensor], prompt: str, ids: list[int]) -> torch.Tensor:
        """(T, V) at the run's temperature."""
        self.model.load_state_dict(weights)
        given = self.tokenizer(prompt, add_special_tokens=False).input_ids
        logits = self.model(torch.tensor([given + ids])).logits[0, len(given) - 1 : -1]
        return (logits.double() / 0.9).log_softmax(dim=-1)

    def logprobs(self, weights: dict[str, torch.Tensor], prompt: str, ids: list[int]) -> list[float]:
        """Of each token."""
        table = self.log_softmax(weights, prompt, ids)
        return [float(table[t, token]) for t, token in enumerate(ids)]


def test_every_number_is_that_of_a_plain_forward_pass_and_an_objective_by_hand(run: Path) -> None:
    step, line, before = 2, _uneven(run, 2), _files(run)
    row = _rows(run)[line - 1]
    after_steps = list[dict[str, torch.Tensor]]()

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        after_steps.append(_named(plain.model, optimizer))

    plain = Plain(run)
    hook = register_optimizer_step_post_hook(note)
    try:
        found = why(run, completion=line, say=lambda line: None)
    finally:
        hook.remove()
    assert _files(run) == before
    assert (found.step, found.prompt_id, found.sample) == (step, row["prompt_id"], row["sample"])
    assert (found.completion, found.question, found.answer) == (row["completion"], row["question"], row["answer"])
    assert found.exact and found.drawn_again is True
    scores = {each.name: {"value": each.value, "status": each.status, "detail": each.detail} for each in found.rewards}
    assert scores == {name: {"detail": "", **score} for name, score in row["rewards"].items()}

    # the advantage: (r − mean) / (std + eps) over the group
    mates = sorted((r for r in _rows(run) if r["step"] == step and r["prompt_id"] == row["prompt_id"]), key=_sample)
    rewards = [1.0 * r["rewards"]["exact"]["value"] + 0.1 * r["rewards"]["format"]["value"] for r in mates]
    mean = sum(rewards) / 4
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 3)
    advantages = [(reward - mean) / (deviation + 1e-4) for reward in rewards]
    mine = advantages[row["sample"]]
    assert found.advantage == pytest.approx(mine, abs=1e-5) and mine < 0
    assert [each.value for each in found.arithmetic] == pytest.approx(
        [rewards[row["sample"]], mean, rewards[row["sample"]] - mean, deviation, mine], abs=1e-5
    )

    # its tokens under the weights before and after the step
    old, new = _weights(run, step), _weights(run, step + 1)
    ids = [token.id for token in found.tokens]
    table = plain.log_softmax(old, row["prompt"], ids)
    mine_before, mine_after = plain.logprobs(old, row["prompt"], ids), plain.logprobs(new, row["prompt"], ids)
    assert [token.logprob for token in found.tokens] == pytest.approx(mine_before, abs=1e-5)
    assert [token.after for token in found.tokens] == pytest.approx(mine_after, abs=1e-5)
    for t, token in enumerate(found.tokens):
        assert token.probability == pytest.approx(math.exp(mine_before[t]), abs=1e-6)
        assert token.entropy == pytest.approx(float(-(table[t].exp() * table[t]).sum()), abs=1e-5)
        ranked = [i for i in table[t].argsort(descending=True).tolist() if i != token.id][:5]
        assert [other.id for other in token.others] == ranked
        chances = [float(table[t, i].exp()) for i in ranked]
        assert [other.probability for other in token.others] == pytest.approx(chances, abs=1e-6)

    # ratio, clip, weight and gradient in the first optimiser step that has it
    (first, second) = [each.number for each in found.steps]
    assert first in (0, 1) and second in (2, 3)
    now = plain.logprobs(after_steps[first - 1] if first else old, row["prompt"], ids)
    weight = 1 / (8 * len(ids))  # half of the 16 completions share an optimiser step
    ratios = [math.exp(a - b) for a, b in zip(now, mine_before, strict=True)]
    for token, ratio in zip(found.tokens, ratios, strict=True):
        clipped = ratio < 1 - EPSILON
        assert token.ratio == pytest.approx(ratio, abs=1e-5)
        assert token.clipped == clipped
        assert token.weight == pytest.approx(weight, rel=1e-5)
        assert token.pull == pytest.approx(0.0 if clipped else weight * mine * ratio, rel=1e-3, abs=1e-8)
    now = plain.logprobs(after_steps[second - 1], row["prompt"], ids)
    late = [math.exp(a - b) for a, b in zip(now, mine_before, strict=True)]
    assert found.steps[1].ratio == pytest.approx(sum(late) / len(late), abs=1e-5)
    assert found.steps[1].clipped == pytest.approx(sum(ratio < 1 - EPSILON for ratio in late) / len(late))
    assert found.steps[1].clipped > 0  # else the test would show nothing

    # what the update made of the group
    assert [each.advantage for each in found.group] == pytest.approx(advantages, abs=1e-5)
    for each, mate in zip(found.group, mates, strict=True):
        assert (each.completion, each.correct, each.tokens) == (mate["completion"], mate["correct"], mate["tokens"])
        written = _ids_of(plain, mate)
        assert each.before == pytest.approx(sum(plain.logprobs(old, mate["prompt"], written)), abs=1e-4)
        assert each.after == pytest.approx(sum(plain.logprobs(new, mate["prompt"], written)), abs=1e-4)


def _sample(row: dict[str, Any]) -> int:
    return int(row["sample"])


def _ids_of(plain: Plain, row: dict[str, Any]) -> list[int]:
    ids = plain.tokenizer(row["completion"], add_special_tokens=False).input_ids
    return [*ids, plain.tokenizer.eos_token_id] if row["finish_reason"] == "stop" else list(ids)


def _named(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The weights of an optimiser's parameters, as a state dict of the same model."""
    values = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    names = [name for name, _ in model.named_parameters()]
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    found = dict(zip(names, values, strict=True))
    assert all(found[name].shape == shapes[name] for name in names)
    return {**found, **{name: found[other] for name, other in _tied(model).items()}}


def _tied(model: PreTrainedModel) -> dict[str, str]:
    by_place = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    return {
        name: by_place[weight.data_ptr()]
        for name, weight in model.state_dict().items()
        if name not in by_place.values()
    }


def test_later_weights_draw_by_the_same_key_what_an_engine_draws_from_them(run: Path) -> None:
    found = why(run, completion=_uneven(run, 1), say=lambda line: None)
    assert [each.rollouts for each in found.later] == [2, 3, 4, 5]
    plain, ids = Plain(run), [token.id for token in found.tokens]
    key = SampleKey(seed=0, split="train", step=1, attempt=0, prompt_id=found.prompt_id, sample=found.sample)
    prompt = plain.tokenizer(found.prompt, add_special_tokens=False).input_ids
    request = GenerateRequest(
        prompt_ids=[prompt],
        keys=[[key]],
        sampling=SamplingParams(max_completion_length=LONGEST, temperature=0.9),
        eos_token_ids=[plain.tokenizer.eos_token_id],
        pad_token_id=plain.tokenizer.pad_token_id,
    )
    for each in found.later:
        plain.model.load_state_dict(_weights(run, each.rollouts))
        drawn = PlainEngine().generate(plain.model, request).completion_ids[0].tolist()
        assert each.completion == plain.tokenizer.decode([i for i in drawn if i != plain.tokenizer.eos_token_id])
        parts = [t for t, (a, b) in enumerate(zip(ids, drawn, strict=False)) if a != b]
        assert each.parts_at == (parts[0] if parts else None if len(ids) == len(drawn) else min(len(ids), len(drawn)))
        assert each.correct == (f"\\boxed{{{found.answer}}}" in each.completion)
    first = next((each.rollouts for each in found.later if each.correct), None)
    assert found.right_from == (None if found.correct else first)


def test_groups_of_dynamic_sampling_are_drawn_again_by_the_attempt_that_drew_them(command_line: Any) -> None:
    given = [f"--config={command_line.config()}", *OPTIONS, "--model.algorithm.dynamic_sampling=true"]
    command_line.done("fit", *given, "--data.steps=2", "--model.validation.samples=1", "--name=drawn_more")
    run = Path(command_line.runs / "drawn_more")
    lines = (run / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    attempts = [float(row["samples/resample_attempts"]) for row in rows if row.get("reward")]
    step = max(range(len(attempts)), key=attempts.__getitem__)
    assert attempts[step] > 0
    rows = [row for row in _rows(run) if row["step"] == step and row["sample"] == 3]
    for row in (rows[0], rows[-1]):  # of the first attempt, and of the last
        found = why(run, step=step, prompt=row["prompt_id"], sample=3, say=lambda line: None)
        assert found.drawn_again and found.completion == row["completion"]


def test_a_branch_is_asked_from_its_first_step_on(command_line: Any, asked: Path) -> None:
    command_line.done(
        "fit", f"--branch={asked}@3", "--name=branched", "--model.optimization.lr=1e-3", runs=asked.parent
    )
    branch = asked.parent / "branched"
    row = next(row for row in _rows(branch) if row["step"] == 3)
    found = why(branch, step=3, prompt=row["prompt_id"], sample=row["sample"], say=lambda line: None)
    assert (found.completion, found.exact) == (row["completion"], True)
    with pytest.raises(CannotReplay, match="give 3 … 4"):
        why(branch, step=2, prompt=row["prompt_id"], sample=0)


def test_a_step_between_checkpoints_is_made_first_and_a_run_keeps_what_it_has(run: Path, tmp_path: Path) -> None:
    for rollouts in (3, 4, 5):
        remove(run / "checkpoints" / f"rollout-{rollouts:06d}.ckpt")
    before, line = _files(run), _uneven(run, 4)
    found = why(run, completion=line, say=lambda line: None)
    assert found.exact and _files(run) == before and not list(cache.replay_root().glob("making-*"))
    row = _rows(run)[line - 1]
    assert (found.completion, found.step) == (row["completion"], 4)
    assert [each.rollouts for each in found.later] == [5]  # only the weights that its own update made


def test_the_command_prints_tables_and_json_and_writes_nothing_into_the_run(command: Any, run: Path) -> None:
    line, before = _uneven(run, 2), _files(run)
    row = _rows(run)[line - 1]
    named = [f"--step={row['step']}", f"--prompt={row['prompt_id']}", f"--sample={row['sample']}"]
    outcome = command(run, *named, "--json")
    assert outcome.status == 0, outcome.err
    told = json.loads(outcome.out)
    assert told == json.loads(json.dumps(why(run, completion=line, say=lambda line: None).as_json()))
    assert not list(run.parent.glob("*.html"))
    plain = command(run, "--completion", line)
    assert plain.status == 0
    (page,) = run.parent.glob("*.html")
    assert page.name == f"why-asked-2-{row['prompt_id']}-{row['sample']}.html" and str(page) in plain.out
    inside = command(run, "--completion", line, "--page", run / "why.html")
    assert inside.status == 2 and "inside the run folder" in inside.err
    for text in ("exact", "format", "mean of the group", "others", "drawn again alone", "bit for bit"):
        assert text in plain.out
    assert _files(run) == before


def _edit(run: Path, name: str, old: str, new: str) -> None:
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new))


def _exchange(run: Path) -> None:
    from grpo_pl.files.checkpoints import seal

    shutil.copyfile(run / "checkpoints" / "rollout-000001.ckpt", run / "checkpoints" / "rollout-000002.ckpt")
    seal(run / "checkpoints" / "rollout-000002.ckpt", {"rollouts": 2, "world_size": 1})


@pytest.mark.parametrize(
    ("arguments", "spoil", "told"),
    [
        (["--step=2"], None, "--completion N"),
        ([], None, "--completion N"),
        (["--completion=3", "--step=2"], None, "--completion N"),
        (["--completion=0"], None, "give 1 … "),
        (["--completion=9999"], None, "give 1 … "),
        (["--step=5", "--prompt=1", "--sample=0"], None, "give 0 … 4"),
        (["--step=-1", "--prompt=1", "--sample=0"], None, "give 0 … 4"),
        (["--step=2", "--prompt=1", "--sample=4"], None, "give 0 … 3"),
        (["--step=2", "--prompt=123456789", "--sample=0"], None, "has no prompt 123456789"),
        (["--completion=33"], lambda run: (run / "run.json").unlink(), "has no run.json"),
        (["--completion=33"], lambda run: shutil.rmtree(run), "there is no run"),
        (["--completion=33"], lambda run: (run / "completions.jsonl").unlink(), "give --step, --prompt and --sample"),
        (["--completion=33"], lambda run: _edit(run, "completions.jsonl", '"step": 4', '"step": 3'), "as the run"),
        (["--completion=33"], lambda run: _edit(run, "config.yaml", "ExactReward", "MyReward"), "--run-rewards"),
        (["--completion=33"], _exchange, "does not hold the weights that the run recorded"),
    ],
)  # fmt: skip
def test_wrong_input_is_told_in_one_line_with_status_2(
    command: Any, run: Path, arguments: list[str], spoil: Any, told: str
) -> None:
    if spoil is not None:
        spoil(run)
    outcome = command(run, *arguments)
    assert outcome.status == 2 and outcome.out == ""
    error = outcome.err.splitlines()[-1]
    assert error.startswith("grpo-pl why: error: ") and told in error


def test_python_raises_what_the_command_tells(run: Path) -> None:
    with pytest.raises(CannotReplay, match="step 7"):
        why(run, step=7, prompt=1, sample=0)
    assert isinstance(why(run, completion=1, say=lambda line: None), Explanation)
