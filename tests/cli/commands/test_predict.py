"""``grpo-pl predict`` on a tiny run: what the lines say, which ones rejection sampling keeps, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.cli.commands.predict import _fate, predict, training_problems
from grpo_pl.cli.main import main
from grpo_pl.data.demonstration_rows import DemonstrationRows
from grpo_pl.data.demonstrations import Demonstration, read_demonstrations
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.policy.trained import find_model
from grpo_pl.rewards import ExactReward
from grpo_pl.types import SampleKey
from tests.race import draw_key, logits_along, winner


@pytest.fixture(scope="module")
def run(command_line: Any) -> Path:
    command_line.done("fit", f"--config={command_line.config('predicted')}", "--data.steps=1", "--name=predicted")
    return Path(command_line.runs / "predicted")


def _rows(folder: Path, model: Path, **options: Any) -> list[dict[str, Any]]:
    predict(model=str(model), output=str(folder / "out.jsonl"), **options)
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_every_completion_is_a_line_with_its_rewards(run: Path, tmp_path: Path, capsys: Any) -> None:
    rows = _rows(tmp_path, run, prompts=5, samples=3, batch_size=7)
    held_out = ArithmeticPrompts(digits=1, scratchpad_share=0.0).validation(5)
    assert [row["prompt"] for row in rows] == [
        [{"role": "user", "content": prompt.question}] for prompt in held_out for _ in range(3)
    ]
    assert [row["sample"] for row in rows] == [0, 1, 2] * 5
    judge = ExactReward()
    texts = [row["completion"][0]["content"] for row in rows]
    scores = judge(texts, [prompt.answer for prompt in held_out for _ in range(3)], {})
    assert [row["correct"] for row in rows] == [score.value == 1.0 for score in scores]
    for row, score in zip(rows, scores, strict=True):
        assert row["rewards"]["exact"] == score.to_dict()
        assert row["reward"] == pytest.approx(score.value + 0.1 * row["rewards"]["format"]["value"])
        assert 1 <= row["tokens"] <= 32
    assert "15 completions of 5 problems" in capsys.readouterr().out


def test_every_token_wins_the_race_of_its_sample(run: Path, tmp_path: Path) -> None:
    model = find_model(run)
    policy, tokenizer = model.load_policy("cpu"), model.tokenizer
    rows = _rows(tmp_path, run, prompts=2, samples=2, seed=5)
    for row in rows:
        prompt = model.template.encode(row["prompt"][0]["content"], tokenizer)
        tokens = tokenizer(row["completion"][0]["content"], add_special_tokens=False).input_ids
        tokens += [tokenizer.eos_token_id] * (row["finish_reason"] == "stop")
        assert len(tokens) == row["tokens"]
        name = {"prompt_id": row["prompt_id"], "sample": row["sample"]}
        key = SampleKey(seed=5, split="predict", step=0, attempt=0, **name)
        along = logits_along(policy, prompt, tokens).tolist()
        assert [winner(logits, draw_key(key, i)) for i, logits in enumerate(along)] == tokens
    assert {row["sample"] for row in rows} == {0, 1}


def test_a_checkpoint_an_export_and_a_run_folder_draw_the_same(run: Path, tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"prompts": 3, "samples": 2, "seed": 5}
    rows = _rows(tmp_path, run, **wanted)
    assert _rows(tmp_path, run / "export", **wanted) == rows
    assert _rows(tmp_path, run / "checkpoints" / "last.ckpt", **wanted) == rows
    assert _rows(tmp_path, run, **{**wanted, "seed": 6}) != rows


def test_rejection_sampling_keeps_right_whole_and_different_completions(run: Path, tmp_path: Path, capsys: Any) -> None:
    wanted: dict[str, Any] = {"prompts": 80, "samples": 6, "split": "train"}
    rows = _rows(tmp_path, run, **wanted)
    expected: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        if row["correct"] and row["finish_reason"] == "stop":
            expected.setdefault((row["prompt_id"], row["completion"][0]["content"]), row)
    kept = _rows(tmp_path, run, keep_correct=True, **wanted)
    assert 0 < len(kept) < len(rows)
    assert kept == list(expected.values())
    assert f"{len(kept)} written" in capsys.readouterr().out
    shown = read_demonstrations(tmp_path / "out.jsonl")  # what a cold start will read
    assert shown[0] == Demonstration(kept[0]["prompt"][0]["content"], kept[0]["completion"][0]["content"])
    of_file = DemonstrationRows(path=str(tmp_path / "out.jsonl"), val_share=0)
    assert of_file.read("train", range(len(kept))) == shown  # what grpo-pl sft will read


def test_a_session_of_several_conversations_is_nothing_to_imitate() -> None:
    row = {"correct": True, "finish_reason": "environment", "prompt_id": 1, "prompt": [], "completion": []}
    turns = [{"action": "a", "segment": number} for number in range(2)]
    assert _fate({**row, "episode": {"turns": turns}}, set()) == "of several conversations"
    assert _fate({**row, "episode": {"turns": [{"action": "a"}]}}, set()) == "kept"


def test_training_problems_are_different_ones_and_end_where_the_source_does() -> None:
    source = ArithmeticPrompts(digits=1)
    some = training_problems(source, 50)
    assert len({prompt.id for prompt in some}) == 50
    assert some[:32] == source.prompts(0, count=32)
    everything = training_problems(source, 500)
    held_out = {prompt.id for prompt in source.validation(3)}
    assert 80 < len(everything) < 100
    assert not held_out & {prompt.id for prompt in everything}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"model": None}, "--model is missing"),
        ({"model": "missing"}, "no such model: missing"),
        ({"samples": 0}, "--samples must be at least 1"),
        ({"config": "missing.yaml"}, r"no such file: missing\.yaml"),
        ({"config": "empty.yaml"}, r"empty\.yaml is empty; a configuration is a mapping"),
    ],
)
def test_mistakes_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.yaml").touch()
    with pytest.raises(ValueError, match=complaint):
        predict(**{"model": str(run), **options})
    assert not Path("predictions.jsonl").exists()


def test_keep_correct_is_a_switch_of_the_command_line(run: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "kept.jsonl"
    for switch, kept in ((["--keep-correct"], True), (["--keep_correct", "false"], False)):
        options = [*switch, "--prompts=6", "--samples=8", f"--output={output}"]
        assert main(["predict", "--model", str(run), *options]) == 0
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert rows and all(row["correct"] for row in rows) == kept


def test_nothing_correct_is_an_error_and_writes_nothing(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to write: of 4 completions 4 not correct"):
        _rows(tmp_path / "new", run, prompts=2, samples=2, keep_correct=True, max_completion_length=2)
    assert not list((tmp_path / "new").iterdir())


def test_prompts_without_room_for_a_completion_are_left_out(run: Path, tmp_path: Path, capsys: Any) -> None:
    rows = _rows(tmp_path, run, prompts=3, samples=1, max_completion_length=44)  # of a context of 48
    assert len(rows) == 3
    with pytest.raises(ValueError, match=r"3 of 3 prompts leave no room .* 3 tokens .*Lower max_completion_length"):
        _rows(tmp_path, run, prompts=3, max_completion_length=45)


def test_trl_trains_on_the_written_lines(run: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _rows(tmp_path, run, prompts=6, samples=8, keep_correct=True)
    table = datasets.load_dataset("json", data_files=str(tmp_path / "out.jsonl"), split="train")
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    quiet = {"report_to": [], "use_cpu": True, "save_strategy": "no", "bf16": False}
    arguments = trl.SFTConfig(output_dir=str(tmp_path / "sft"), max_steps=1, **quiet)
    model = AutoModelForCausalLM.from_pretrained(run / "export")
    trainer = trl.SFTTrainer(model, args=arguments, train_dataset=table, processing_class=tokenizer)
    row = trainer.train_dataset[0]
    text = tokenizer.decode([label for label in row["labels"] if label >= 0])
    assert text.startswith(table[0]["completion"][0]["content"])
    assert trainer.train().training_loss > 0
