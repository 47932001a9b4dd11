"""Supervised fine-tuning: the loss, `grpo-pl sft` from rows to an export, resume to the bit, faults, TRL's trainer."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from safetensors.torch import load_file
from torch.nn import functional as F

from grpo_pl.data.demonstration_rows import DemonstrationRows
from grpo_pl.data.demonstrations import draw_in_passes
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.trained import find_model
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.sft_module import SFTData, SFTModule
from tests.conftest import TINY_POLICY, CommandLine
from tests.training.runs import ReadMetrics, assert_same_end

EPISODE = {
    "messages": [
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "too large"},
        {"role": "assistant", "content": "3"},
    ]
}
ROWS = [{"prompt": f"{i}+{i % 7}=", "completion": f"{i + i % 7}"} for i in range(59)] + [EPISODE]
CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {"accelerator": "cpu", "val_check_interval": 4},
    "model": {
        "policy": {"from_scratch": TINY_POLICY},
        "optimization": {"lr": 0.01, "warmup_rollouts": 1, "schedule": "cosine"},
        "sampling": {"max_completion_length": 8},
        "max_tokens_per_microbatch": 40,
    },
    "data": {"rows": {"val_share": 0.2}, "steps": 12, "rows_per_step": 8},
    "checkpoint": {"every_n_rollouts": 4, "keep": 9},
}


def write_config(folder: Path, name: str = "tuned", rows: Sequence[Any] = ROWS, **parts: Any) -> Path:
    """A configuration, and its rows in a file beside it."""
    tree = {key: {**value, **parts.get(key, {})} if isinstance(value, dict) else value for key, value in CONFIG.items()}
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree["data"]["rows"] = {**tree["data"]["rows"], "path": str(data)}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.fixture(scope="module")
def tuned(command_line: CommandLine) -> Path:
    """The folder of a run of twelve steps."""
    command_line.done("sft", "--config", write_config(command_line.folder))
    return command_line.runs / "tuned"


def _loss(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> float:
    """The mean over completion tokens by transformers alone, row by row: characters are tokens."""
    summed, count = 0.0, 0
    for row in rows:
        parts = [(row["prompt"], False), (f"{row['completion']}<eos>", True)] if "prompt" in row else []
        parts = parts or [("1+2=", False), ("12<eos>", True), ("\ntoo large\n", False), ("3<eos>", True)]
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text, _ in parts]
        labels = [token if own else -100 for tokens, (_, own) in zip(ids, parts, strict=True) for token in tokens]
        logits = model(torch.tensor([[token for tokens in ids for token in tokens]])).logits[0]
        summed += float(F.cross_entropy(logits[:-1], torch.tensor(labels[1:]), reduction="sum"))
        count += sum(label >= 0 for label in labels)
    return summed / count


@torch.no_grad()
def test_the_loss_is_the_mean_over_the_tokens_of_completions(tuned: Path, read_metrics: ReadMetrics) -> None:
    source = DemonstrationRows(path=str(tuned.parent.parent / "tuned.jsonl"), val_share=0.2)
    numbers = source.sort(lambda shown: [None] * len(shown)).numbers
    config = PolicyConfig(from_scratch=TINY_POLICY)
    tokenizer = load_tokenizer(config)
    rows = read_metrics(tuned / "metrics.csv")
    first = [ROWS[n] for n in draw_in_passes(numbers["train"], step=0, count=8, seed=0)]
    held_out = [ROWS[n] for n in numbers["val"]]
    assert 59 in numbers["train"]
    for model, at, shown, key in (
        (load_model(config, tokenizer), "1", first, "loss"),
        (load_model(config, tokenizer), "0", held_out, "val/loss"),
        (find_model(tuned).load_policy("cpu"), "12", held_out, "val/loss"),
    ):
        (found,) = [row[key] for row in rows if row["step"] in (at, f"{at}.0") and key in row]
        assert float(found) == pytest.approx(_loss(model, tokenizer, shown), rel=1e-5)


def test_an_episode_is_learned_without_what_is_read_between(tmp_path: Path) -> None:
    module = SFTModule(PolicyConfig(from_scratch=TINY_POLICY))
    data = SFTData(
        DemonstrationRows(path=str(write_config(tmp_path, rows=[EPISODE]).with_suffix(".jsonl")), val_share=0)
    )
    module.check(data)
    (example,) = data.read("train", [0])
    written = [token for token, own in zip(example.completion, example.written, strict=True) if own]
    assert module.tokenizer.decode(written) == "12<eos>3<eos>"
    assert module.tokenizer.decode(example.completion) == "12<eos>\ntoo large\n3<eos>"


def test_a_run_learns_and_leaves_a_model_that_is_served_and_trained_on(
    tuned: Path, command_line: CommandLine, read_metrics: ReadMetrics
) -> None:
    rows = read_metrics(tuned / "metrics.csv")
    assert [int(row["step"]) for row in rows if "loss" in row] == list(range(1, 13))
    held_out = [row for row in rows if "val/loss" in row]
    assert [int(float(row["step"])) for row in held_out] == [0, 4, 8, 12]
    losses = [float(row["val/loss"]) for row in held_out]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]
    best = torch.load(tuned / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["SFTData"]["completed_rollouts"] == 12  # the lowest val/loss is the highest val/likelihood
    moved = shutil.copy(tuned / "checkpoints" / "last.ckpt", command_line.folder / "moved.ckpt")
    for served in (find_model(tuned), find_model(tuned / "checkpoints" / "last.ckpt"), find_model(moved)):
        assert served.rewards == [] and served.sampling.max_completion_length == 8
        ours, theirs = served.load_policy("cpu").state_dict(), load_file(tuned / "export" / "model.safetensors")
        assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert "fine-tuned on demonstrations (tuned.jsonl)" in (tuned / "export" / "README.md").read_text()
    fit = command_line("fit", "--config", command_line.config(model__cold_start=None), "--data.steps=1", "--name=rl",
                       "--model.policy.from_scratch=null", f"--model.policy.path={tuned / 'export'}")  # fmt: skip
    assert fit.status == 0, fit.err


def test_micro_batches_change_nothing_and_adapters_change_their_layers_alone(
    tuned: Path, command_line: CommandLine, read_metrics: ReadMetrics
) -> None:
    config = command_line.folder / "tuned.yaml"
    command_line.done("sft", "--config", config, "--name=whole", "--model.max_tokens_per_microbatch=null")
    ours, theirs = (read_metrics(run / "metrics.csv") for run in (command_line.runs / "whole", tuned))
    for one, other in zip(ours, theirs, strict=True):
        assert {k: float(v) for k, v in one.items()} == pytest.approx({k: float(v) for k, v in other.items()}, rel=1e-3)
    lora = ("--model.policy.lora.rank=4", "--model.activation_checkpointing=true", "--name=adapters")
    command_line.done("sft", "--config", config, *lora, "--data.steps=2")
    weights = load_file(command_line.runs / "adapters" / "export" / "model.safetensors")
    first = load_model(config := PolicyConfig(from_scratch=TINY_POLICY), load_tokenizer(config)).state_dict()
    changed = {name for name, weight in weights.items() if not torch.equal(weight, first[name])}
    assert changed and all("proj" in name for name in changed)


def _killed(command_line: CommandLine, config: Path, name: str, visit: int) -> None:
    """A run that kills itself in the update of a step, counted within the process."""
    from tests.forked import forked

    def run() -> int:
        clip, visits = Optimization.clip_gradients, []

        def clip_or_die(self: Optimization, parameters: Any) -> Any:
            visits.append(0)
            if len(visits) == visit:
                os.kill(os.getpid(), signal.SIGKILL)
            return clip(self, parameters)

        Optimization.clip_gradients = clip_or_die  # type: ignore[method-assign]
        return command_line("sft", "--config", config, "--resume", f"--name={name}").status

    process, output = forked(run)
    with output:
        said = output.read()
    assert process.wait() == -signal.SIGKILL, said


def test_a_run_that_is_killed_and_resumed_ends_bit_for_bit(
    tuned: Path, command_line: CommandLine, read_metrics: ReadMetrics
) -> None:
    config = command_line.folder / "tuned.yaml"
    for visit in (7, 3, 6):  # steps 7, 7 and 10 of the run, whose checkpoints are made every four
        _killed(command_line, config, "killed", visit)
    command_line.done("sft", "--config", config, "--resume", "--name=killed")
    ours = command_line.runs / "killed"
    assert_same_end(ours, tuned)
    assert read_metrics(ours / "metrics.csv") == read_metrics(tuned / "metrics.csv")
    exports = [(run / "export" / "model.safetensors").read_bytes() for run in (ours, tuned)]
    assert exports[0] == exports[1]


@pytest.mark.slow
def test_a_run_that_is_killed_ten_times_ends_bit_for_bit(
    tuned: Path, command_line: CommandLine, read_metrics: ReadMetrics
) -> None:
    """In a step that is drawn, with a checkpoint after each."""
    config, rng = write_config(command_line.folder, "often", checkpoint={"every_n_rollouts": 1, "keep": 2}), Random(0)
    for _ in range(10):
        _killed(command_line, config, "often", rng.randint(1, 2))
    command_line.done("sft", "--config", config, "--resume", "--name=often")
    ours = command_line.runs / "often"
    assert read_metrics(ours / "metrics.csv") == read_metrics(tuned / "metrics.csv")
    exports = [(run / "export" / "model.safetensors").read_bytes() for run in (ours, tuned)]
    assert exports[0] == exports[1]


def test_a_run_does_not_go_on_with_other_rows_or_another_model(tuned: Path, command_line: CommandLine) -> None:
    checkpoint = tuned / "checkpoints" / "rollout-000004.ckpt"
    config = write_config(command_line.folder, "other", ROWS[1:])
    for options, told in (
        ((), "data.rows changed since this run began"),
        (("--data.seed=1",), "data.rows and data.seed changed"),
        (("--model.policy.from_scratch.hidden_size=16",), "holds another model"),
    ):
        run = command_line("sft", "--config", config, f"--ckpt_path={checkpoint}", *options)
        assert run.status == 1 and told in run.err, run.err
    assert not (command_line.runs / "other").exists()


def test_a_fit_in_python_is_the_run_of_the_command_line(tuned: Path, command_line: CommandLine, tmp_path: Path) -> None:
    module = SFTModule(
        PolicyConfig(from_scratch=TINY_POLICY), optimization=Optimization(lr=0.01), max_tokens_per_microbatch=40
    )
    rows = DemonstrationRows(path=str(command_line.folder / "tuned.jsonl"), val_share=0.2)
    trainer = Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0,
        use_distributed_sampler=False, enable_model_summary=False, inference_mode=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(module, SFTData(rows, steps=12, rows_per_step=8))
    module.export(tmp_path / "export")
    ours, theirs = (load_file(folder / "export" / "model.safetensors") for folder in (tmp_path, tuned))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    with pytest.raises(ValueError, match="SFTData as datamodule"):
        Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit(module, [1])


def test_a_few_steps_are_repeated_or_tried(command_line: CommandLine, tuned: Path, read_metrics: ReadMetrics) -> None:
    config = command_line.folder / "tuned.yaml"
    command_line.done("sft", "--config", config, "--name=overfit", "--trainer.overfit_batches=1", "--data.steps=6")
    rows = [row for row in read_metrics(command_line.runs / "overfit" / "metrics.csv") if "loss" in row]
    assert len(rows) == 6 and len({row["tokens"] for row in rows}) == 1
    command_line.done("sft", "--config", config, "--name=tried", "--trainer.fast_dev_run=true")
    assert not list((command_line.runs / "tried" / "checkpoints").glob("*"))


STOPPING = {"class_path": "lightning.pytorch.callbacks.EarlyStopping"}


def test_a_run_that_gets_no_better_stops_early(command_line: CommandLine, read_metrics: ReadMetrics) -> None:
    stopping = {**STOPPING, "init_args": {"monitor": "val/loss", "min_delta": 9.0, "patience": 2}}
    loggers = [
        {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(command_line.folder)}}
    ]
    trainer = {**CONFIG["trainer"], "callbacks": [stopping], "logger": loggers}
    config = write_config(command_line.folder, "early", trainer=trainer)
    command_line.done("sft", "--config", config)
    rows = read_metrics(command_line.runs / "early" / "metrics.csv")
    assert [int(row["step"]) for row in rows if "loss" in row] == list(range(1, 9))  # validated at 0, 4 and 8
    (others,) = command_line.folder.glob("lightning_logs/*/metrics.csv")
    assert "loss" in others.read_text().splitlines()[0].split(",")
    assert (command_line.runs / "early" / "export" / "model.safetensors").is_file()


def _faults(folder: Path) -> dict[str, tuple[dict[str, Any], list[Any], str]]:
    good = {"prompt": "1+1=", "completion": "2"}
    bad = [good, {"prompt": "2", "completion": "3" * 60}]
    return {
        "no completion": ({}, [good, {"prompt": "1"}], "row 1: it has no completion"),
        "beyond the context": ({}, bad, "row 1: it has 62 tokens, and the model's context has 48"),
        "beyond the budget": (
            {"model": {"policy": {"from_scratch": TINY_POLICY}, "max_tokens_per_microbatch": 5}},
            ROWS,
            "and model.max_tokens_per_microbatch is 5",
        ),
        "odd characters": ({}, [good, {"prompt": "π", "completion": "3"}], "row 1: the vocabulary lacks 'π'"),
        "no prompt": ({}, [good, {"prompt": "", "completion": "3"}], "row 1: its prompt has no tokens"),
        "tools": ({}, [good, {**good, "tools": [{"name": "f"}]}], "row 1: it offers tools"),
        "no prefill": (
            {"model": {"policy": {"from_scratch": TINY_POLICY}, "template": {"prefill": "<think>"}}},
            [good, good],
            "row 0: a demonstration does not begin with the template's prefill",
        ),
        "unequal shares": (
            {"trainer": {"devices": 3, "strategy": "ddp"}},
            ROWS,
            "data.rows_per_step=8 does not divide among 3 processes",
        ),
        "clipping of Lightning's": ({"trainer": {"gradient_clip_val": 1.0}}, ROWS, "model.optimization.max_grad_norm"),
        "no interval": ({"trainer": {"val_check_interval": 0}}, ROWS, "val_check_interval"),
        "the largest loss": ({"checkpoint": {"monitor": "val/loss"}}, ROWS, "set val/likelihood"),
        "no such number": (
            {"trainer": {"callbacks": [{**STOPPING, "init_args": {"monitor": "val/los"}}]}},
            ROWS,
            "did you mean val/loss?",
        ),
        "images": (
            {"model": {"policy": {"from_scratch": TINY_POLICY, "images": True}}},
            [{**good, "image": "a.png"}, good],
            "policy.images does not go with `grpo-pl sft`",
        ),
        "no model": ({"model": {"policy": {"path": str(folder / "nothing")}}}, ROWS, "nothing"),
    }


def test_faults_end_in_one_line_before_a_run_folder_is_made(command_line: CommandLine) -> None:
    for number, (what, (parts, rows, told)) in enumerate(_faults(command_line.folder).items()):
        config = write_config(command_line.folder, f"fault{number}", rows, **parts)
        run = command_line("sft", "--config", config)
        assert run.status in (1, 2) and told in run.err and len(run.err.strip().splitlines()) == 1, (what, run.err)
        assert not (command_line.runs / f"fault{number}").exists()


def test_mistakes_name_the_verb_that_was_typed(command_line: CommandLine) -> None:
    for options, told in (
        ([], "such as --config configs/sft.yaml"),
        (["--config=configs/quickstart.yaml"], "unknown key"),
    ):
        run = command_line("sft", *options)
        first, second = run.err.splitlines()
        assert run.status == 2 and first.startswith("grpo-pl sft: error: ") and told in first, run.err
        assert second == "(all options: grpo-pl sft --help)"


def test_characters_and_rates_are_found_in_the_rows(command_line: CommandLine) -> None:
    rows = [{"prompt": f"{i} π", "completion": "ж"} for i in range(40)]
    policy = {"from_scratch": TINY_POLICY, "characters": "from_data"}
    parts = {"model": {"policy": policy, "optimization": {}}, "data": {"steps": 2}}
    config = write_config(command_line.folder, "found", rows, **parts)
    run = command_line.done("sft", "--config", config)
    resolved = yaml.safe_load((command_line.runs / "found" / "config.yaml").read_text())["model"]
    assert resolved["policy"]["characters"].endswith("~πж") and "model.optimization.lr" in run.err
    assert resolved["optimization"]["lr"] == 3e-3 and resolved["optimization"]["schedule"] == "cosine"
    assert find_model(command_line.runs / "found").tokenizer.decode(
        load_tokenizer(PolicyConfig(path=str(command_line.runs / "found" / "export")))("ж").input_ids
    ) == "ж"  # fmt: skip


def test_the_shipped_configuration_learns_from_its_rows(command_line: CommandLine, tmp_path: Path) -> None:
    """With a small model, and from a folder that has no configs."""
    policy = {"from_scratch": {**TINY_POLICY, "max_position_embeddings": 256}}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({"model": {"policy": {"path": None, **policy}}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        run = command_line.done(
            "sft",
            "--config",
            "configs/sft.yaml",
            "--config",
            "small.yaml",
            "--data.steps=9",
            "--model.optimization.lr=3e-3",
        )
    assert (command_line.runs / "sft" / "export" / "model.safetensors").is_file(), run.err


@pytest.mark.slow
def test_the_loss_curve_is_that_of_trl(command_line: CommandLine, read_metrics: Callable[..., Any]) -> None:
    trl = pytest.importorskip("trl", reason="TRL is a development dependency: pip install 'grpo_pl[dev]'")
    from datasets import Dataset

    rows = [row for row in ROWS if "prompt" in row]
    command_line.done(
        *("sft", "--config", write_config(command_line.folder, "beside", rows), "--data.rows.val_share=0"),
        *("--model.optimization.warmup_rollouts=0", "--model.optimization.schedule=constant"),
    )
    ours = [float(row["loss"]) for row in read_metrics(command_line.runs / "beside" / "metrics.csv")]
    config = PolicyConfig(from_scratch=TINY_POLICY)
    order = [n for step in range(12) for n in draw_in_passes(range(len(rows)), step=step, count=8, seed=0)]
    tokenizer = load_tokenizer(config)
    trainer = trl.SFTTrainer(
        load_model(config, tokenizer),
        args=trl.SFTConfig(
            output_dir=str(command_line.folder / "trl"), max_steps=12, per_device_train_batch_size=8, logging_steps=1,
            learning_rate=0.01, lr_scheduler_type="constant", adam_beta2=0.99, max_grad_norm=1.0, report_to=[],
            use_cpu=True, bf16=False, save_strategy="no", completion_only_loss=True, shuffle_dataset=False, seed=0,
            gradient_checkpointing=False, max_length=None,
        ),
        train_dataset=Dataset.from_list([rows[n] for n in order]),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(order)
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert ours == pytest.approx(theirs, abs=1e-3)
    shutil.rmtree(command_line.folder / "trl", ignore_errors=True)


CHAT = (
    "{% if tools %}<tools>{% for t in tools %}{{ t['function']['name'] }};{% endfor %}{{ '\n' }}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_chat_model_reads_system_messages_tools_and_results(tmp_path: Path) -> None:
    config = PolicyConfig(from_scratch={**TINY_POLICY, "max_position_embeddings": 256})
    tokenizer = load_tokenizer(config)
    tokenizer.chat_template = CHAT
    load_model(config, tokenizer).save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    said = [("system", "Add."), ("user", "1+1"), ("assistant", "add(1, 1)"), ("tool", "2"), ("assistant", "It is 2.")]
    row = {"messages": [{"role": role, "content": text} for role, text in said], "tools": [schema]}
    file = write_config(tmp_path, rows=[row, ROWS[0]]).with_suffix(".jsonl")
    template = PromptTemplate(system="Solve.", user="{question}=")
    module = SFTModule(PolicyConfig(path=str(tmp_path / "chat")), template)
    module.check(data := SFTData(DemonstrationRows(path=str(file), val_share=0)))
    called, plain = data.read("train", [0, 1])
    decode = module.tokenizer.decode
    assert decode(called.prompt) == "<tools>add;\n<system>Add.\n<user>1+1=\n<assistant>"
    assert decode(called.completion) == "add(1, 1)<eos>\n<tool>2\n<assistant>It is 2.<eos>"
    written = [token for token, own in zip(called.completion, called.written, strict=True) if own]
    assert decode(written) == "add(1, 1)<eos>It is 2.<eos>"
    assert decode(plain.prompt) == "<system>Solve.\n<user>0+0==\n<assistant>" and decode(plain.completion) == "0<eos>"
