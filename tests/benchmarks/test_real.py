"""``benchmarks/real.py``: both sides do the same work, and an interrupted record is gone on with."""

import argparse
import contextlib
import importlib
import importlib.util
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from grpo_pl.data.tasks.word_problems import WordProblems
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.rewards import MathReward
from grpo_pl.rewards.base import Score
from grpo_pl.training.optimization import Optimization

ROOT = Path(__file__).parents[2]
CHAT = "You add.\n{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def real() -> Iterator[Any]:
    pytest.importorskip("trl", reason="TRL is a development dependency: pip install 'grpo_pl[dev]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("real")  # by the name under which its child processes find it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny made-up chat model whose tokens are characters."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def work(real: Any, model: str) -> Any:
    return real.Work(
        model=model,
        steps=3,
        prompts=2,
        group=2,
        tokens=4,
        threads=1,
        micro_batch=2,
        bf16=False,
        optimization=Optimization(lr=0.5, warmup_rollouts=1, schedule="linear", final_lr_fraction=0.5),
    )


class Interrupted(RuntimeError):
    pass


class Parity(MathReward):
    """Right answers for a model that knows nothing, as good as by chance."""

    def __call__(self, completions: Any, answers: Any, columns: Any) -> list[Score]:
        right = [zlib.crc32(text.encode()) % 2 for text in completions]
        return [Score(1.0, "ok") if one else Score(0.0, "wrong") for one in right]


class Notes:
    """Keeps what it is told, and ends the run after some steps."""

    def __init__(self, steps: int = 10) -> None:
        self.left, self.steps, self.used = steps, list[Any](), dict[str, Any]()

    def before(self, model: Any) -> None:
        pass

    def after(self, step: Any, model: Any, used: Any) -> bool:
        self.steps.append(step)
        self.used = used
        self.left -= 1
        if self.left == 0:
            raise Interrupted
        return False


# --- the same work ----------------------------------------------------------------------------------------------------


def test_what_trl_computes_with_is_observed(real: Any, work: Any, tmp_path: Path) -> None:
    tuned, default = Notes(), Notes(1)
    real.train("trl_tuned", work, tuned, tmp_path)
    assert tuned.used["gradient_checkpointing"] is False and tuned.used["forward_passes_of_a_micro_batch"] == 1
    assert (tuned.used["products_update"], tuned.used["products_rollout"]) == ("float32", "float32")
    assert (tuned.used["micro_batch_rows"], tuned.used["loss_type"]) == (2, "grpo")
    with pytest.raises(Interrupted):
        real.train("trl_default", work, default, tmp_path)
    assert default.used["gradient_checkpointing"] is True and default.used["forward_passes_of_a_micro_batch"] == 2
    assert default.used["products_update"] == "bfloat16" and default.used["weights"] == "float32"
    for step in tuned.steps:
        assert step.seconds == pytest.approx(step.rollout + step.reward + step.update) and step.update > 0
        assert 4 <= step.tokens <= 16 and step.trained_rows == 4


@pytest.mark.slow
def test_the_search_sends_the_fastest_of_what_it_tried(real: Any, work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sent(list[Any]):
        send = list.append

    for multiplies in (False, True):
        monkeypatch.setattr(real, "multiplies_bfloat16", lambda multiplies=multiplies: multiplies)
        sent = Sent()
        real.search(real.replace(work, prompts=4, group=8, micro_batch=None), sent)
        (found,) = sent
        sizes = {row["micro_batch"]: row["seconds"] for row in found["tried"] if row["prompts"] == 2}
        assert set(sizes) == {16, 8} and sizes[found["micro_batch"]] == min(sizes.values())
        types = [row["bf16"] for row in found["tried"] if row["prompts"] == 1]
        assert types == ([False, True] if multiplies else [])


def test_defaults_in_float32_are_defaults_otherwise(real: Any, work: Any, tmp_path: Path) -> None:
    notes = Notes(1)
    with pytest.raises(Interrupted):
        real.train("trl_default_float32", work, notes, tmp_path)
    assert notes.used["products_update"] == "float32" and notes.used["gradient_checkpointing"] is True
    assert notes.used["loss_type"] == "dapo"


def test_rates_of_trl_are_ours(real: Any, work: Any, tmp_path: Path) -> None:
    rates = []

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, optimizer: Any, **_: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    trl = real.TrlSteps(work, Notes(), tmp_path, **real.tuned_options(work))
    trl.trainer.add_callback(Rates())
    trl.trainer.train()
    assert rates == [0.25, 0.5, 0.375]  # one step of warm-up at half the rate; down to a half after the last of three


def test_trl_that_reads_other_prompts_is_refused(
    real: Any, work: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "TEMPLATE", PromptTemplate(user="Question: {question}"))
    with pytest.raises(AssertionError, match="other prompts"):
        real.train("trl_tuned", work, Notes(), tmp_path)


def test_trl_gets_the_verdicts_of_our_reward(real: Any, work: Any, tmp_path: Path) -> None:
    trl = real.TrlSteps(work, Notes(), tmp_path, **real.tuned_options(work))
    tokenizer = character_tokenizer()
    texts = ["14 + 5 = 19", "It is 5, no: 19.0!", "19 of 20", "none"]
    ids = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts]
    assert trl._score(completion_ids=ids, gold=["19"] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert trl._tokens == sum(map(len, texts)) + 4


def test_ours_skips_rows_without_advantage_unless_told_otherwise(real: Any, work: Any, tmp_path: Path) -> None:
    """The made-up model is never right, so no completion has an advantage."""
    for name, rows in (("ours", 0), ("ours_all_rows", 4)):
        notes = Notes()
        real.train(name, work, notes, tmp_path)
        assert [step.trained_rows for step in notes.steps] == [rows] * 3


def test_medians_and_ratios_are_those_of_rounds(real: Any) -> None:
    def rows(*seconds: float) -> list[dict[str, Any]]:
        steps = [
            real.Step(seconds=s, rollout=1.0, reward=0, update=s - 1, tokens=3, trained_rows=4, mean_reward=0)
            for s in seconds
        ]
        return [{"step": asdict(step), "peak_mib": 10 + i, "used": {}} for i, step in enumerate(steps)]

    found = real.compared({"ours": rows(2, 3, 5), "trl_default": rows(20, 21, 30)})
    assert found["contenders"]["ours"]["seconds"]["median"] == 3 and found["contenders"]["ours"]["peak_mib"] == 12
    assert found["ratios"] == {"trl_default/ours": {"seconds": 7.0, "rollout": 1.0, "update": 10.0}}


# --- processes --------------------------------------------------------------------------------------------------------


def fails(connection: Any) -> None:
    raise SystemExit(3)


@pytest.mark.slow
def test_a_contender_that_dies_is_named(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)  # the child unpickles a function of this file
    child = real.Child("trl_tuned", fails)
    with pytest.raises(RuntimeError, match="trl_tuned ended with status 3"):
        child.receive()


@pytest.mark.slow
def test_contenders_take_turns_and_the_record_has_no_paths(
    real: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["steps", "--path", model, f"--output={tmp_path / 'record.json'}", "--contenders", "ours", "ours_all_rows"]
    words += ["--steps=2", "--prompts=2", "--group=2", "--tokens=4", "--threads=1", "--no-cold-start"]
    monkeypatch.setattr(sys, "argv", ["real.py", *words])
    real.main()
    text = (tmp_path / "record.json").read_text()
    assert str(tmp_path) not in text and str(Path(model).parent) not in text
    record = json.loads(text)
    assert record["command"].startswith("python benchmarks/real.py steps --contenders ours ours_all_rows --steps=2")
    assert [len(found["steps"]) for found in record["contenders"].values()] == [2, 2]
    order = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith('{"round"')]
    assert [(row["round"], row["contender"]) for row in order] == [
        (1, "ours"), (1, "ours_all_rows"), (2, "ours"), (2, "ours_all_rows")
    ]  # fmt: skip


# --- curve ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contender", ["ours", pytest.param("trl_tuned", marks=pytest.mark.slow)])
def test_an_interrupted_curve_goes_on_from_its_last_evaluation(
    real: Any, work: Any, tmp_path: Path, contender: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "reward", lambda: Parity(correctness=True))

    class Nobody:
        def send(self, what: Any) -> None:
            pass

    def drawn(name: str) -> dict[str, Any]:
        output = tmp_path / f"{name}.json"
        if not output.is_file():
            run = {"contender": contender, "seed": 0, "steps": [], "points": []}
            output.write_text(json.dumps({"runs": [run]}))
        with contextlib.suppress(Interrupted):
            real.draw_curve(contender, work, [0, 2, 3], 3, output, Nobody())
        (found,) = json.loads(output.read_text())["runs"]
        return dict(found)

    straight = drawn("straight")
    assert straight["complete"] and not (tmp_path / f"straight-{contender}-0").exists()
    evaluate, calls = real.Evaluator.__call__, []

    def interrupted(self: Any, model: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise Interrupted
        return evaluate(self, model)

    monkeypatch.setattr(real.Evaluator, "__call__", interrupted)
    before = drawn("cut")
    assert [point["rollouts"] for point in before["points"]] == [0, 2] and not before.get("complete")
    after = drawn("cut")
    assert len(calls) == 4  # the third one alone was missing
    for run in (straight, after):
        assert [point["rollouts"] for point in run["points"]] == [0, 2, 3] and len(run["steps"]) == 3
    assert after["steps"][:2] == before["steps"]
    exact = [[(step["tokens"], step["mean_reward"]) for step in run["steps"]] for run in (straight, after)]
    assert exact[0] == exact[1] and {reward for _, reward in exact[0]} > {0.5}
    right = [[point["numbers"] | point["wordings"] for point in run["points"]] for run in (straight, after)]
    assert right[0] == right[1]


@pytest.mark.slow
def test_finished_runs_are_kept_and_other_settings_refused(
    real: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "curve.json"

    def call(*more: str) -> None:
        words = ["curve", "--path", model, "--contender=ours", "--at", "1", "--problems=2", f"--output={output}"]
        words += ["--prompts=2", "--group=2", "--tokens=4", "--threads=1", "--no-cold-start", *more]
        monkeypatch.setattr(sys, "argv", ["real.py", *words])
        real.main()

    call()
    (first,) = json.loads(output.read_text())["runs"]
    assert first["complete"] and [point["rollouts"] for point in first["points"]] == [0, 1]
    with monkeypatch.context() as patch:
        patch.setattr(real, "Child", None)  # nothing is made again
        call()
        with pytest.raises(ValueError, match="other settings"):
            call("--tokens=5")
    assert json.loads(output.read_text())["runs"] == [first]


def test_held_out_problems_are_those_of_the_recipe(real: Any, work: Any) -> None:
    evaluator = real.Evaluator(work, 5)
    assert evaluator._sets == {
        name: WordProblems(held_out=name, operations="+*", largest=18, two_step_share=0.35).validation(5)
        for name in ("numbers", "wordings", "two_step")
    }
    arguments = real.parsed(["curve", "--contender=ours", "--output=x"])
    assert isinstance(arguments, argparse.Namespace)
    assert (arguments.prompts, arguments.group, arguments.tokens, arguments.problems) == (8, 8, 32, 400)


def test_the_comparison_is_that_of_each_recipe(real: Any) -> None:
    """What the benchmark holds fixed, and what it takes from the file, of both."""
    for recipe, tokens in (("smollm2", 32), ("gsm_symbolic", 160)):
        model = real.settings(recipe)["model"]
        assert model["template"] == {"system": real.SYSTEM, "user": "{question}"}
        (reward,) = model["rewards"]
        assert MathReward(**reward["init_args"]) == real.reward()
        arguments = real.parsed(["steps", "--recipe", recipe])
        assert (arguments.prompts, arguments.group, arguments.tokens) == (8, 8, tokens)


# --- picture ----------------------------------------------------------------------------------------------------------


def test_the_picture_is_drawn_from_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each run of the recipe the end is that on 400 problems, and seed 1, whose times mean nothing, is left out."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    spec = importlib.util.spec_from_file_location("real_plot", ROOT / "docs" / "plots" / "real.py")
    assert spec is not None and spec.loader is not None
    plot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plot)
    results = ROOT / "benchmarks" / "results"
    records = [results / f"2026-11-25-{name}-zen4.json" for name in ("real-curve", "smollm2")]
    theirs, first, third = plot.read(records, [0, 2])
    assert (theirs[0], theirs[1][-1]["numbers"], theirs[1][-1]["problems"]) == ("trl_tuned", 0.94, 400)
    assert [point["numbers"] for point in first[1]] == [0.77, 0.98, 0.9, 0.99, 0.968]
    assert [point["problems"] for point in third[1]] == [100, 100, 100, 100, 400]
    assert third[1][-1]["minutes"] == pytest.approx(310.49 / 60) and third[1][-1]["two_step"] == 0.943
    monkeypatch.setattr(sys, "argv", ["real.py", *map(str, records), "--output", str(tmp_path / "real.png")])
    plot.main()
    assert (tmp_path / "real.png").read_bytes().startswith(b"\x89PNG")
