"""The commands of docs/first_steps.md on one's own data, reward and model, run as they are written, on stand-ins: a
smaller quickstart, and a small model and data set in local folders of the names that the commands ask the hub for."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from grpo_pl.cli.commands import TRAINER_VERBS, VERBS
from grpo_pl.cli.main import main
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from tests.docs.pages import ROOT, blocks, page, run, section
from tests.docs.shell import forked_commands

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def _commands(heading: str) -> str:
    return "\n".join(blocks(section(page("first_steps"), heading), "bash"))


def _smaller(config: Path, **changes: Any) -> None:
    tree = yaml.safe_load(config.read_text())
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        node = tree
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    config.write_text(yaml.safe_dump(tree))


def _run(commands: str, folder: Path) -> str:
    environment = {
        **os.environ,
        "GRPO_PL_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as place, forked_commands(Path(place)) as commands_of_ours:
        environment["PATH"] = f"{commands_of_ours}:{Path(sys.executable).parent}:{environment['PATH']}"
        done = subprocess.run(
            ["bash", "-euc", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=800
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with the shipped configurations, made smaller, where the main job was run."""
    place = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "configs", place / "configs")
    quickstart = yaml.safe_load((place / "configs" / "quickstart.yaml").read_text())
    scratch = {**quickstart["model"]["policy"]["from_scratch"], **SMALL, "num_key_value_heads": 2}
    _smaller(
        place / "configs" / "quickstart.yaml",
        model__policy__from_scratch=scratch,
        model__cold_start={"steps": 5, "batch_size": 8},
        data__steps=2,
        data__prompts_per_step=4,
        data__val_prompts=8,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("GRPO_PL_CACHE", str(place / "cache"))
        assert main(["fit", "--config", "configs/quickstart.yaml"]) == 0
    return place


def test_a_run_is_drawn(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    run(str(ROOT / "docs/plots/quickstart.py"), "runs/quickstart", "--output=run.png", folder=folder)
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")


def test_own_data(folder: Path) -> None:
    _run(_commands("Your own data"), folder)
    completions = (folder / "runs" / "my_data" / "completions.jsonl").read_text()
    assert completions.startswith('{"step": 0') and '"answer": "' in completions
    assert "####" not in completions  # the pattern took the answer out of its sentence


def test_own_reward(folder: Path) -> None:
    _run(_commands("Your own reward"), folder)
    assert "rewards/brevity/mean" in (folder / "runs" / "my_reward" / "metrics.csv").read_text().splitlines()[0]


def test_own_model(folder: Path) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install 'grpo_pl[lora]'")
    policy = PolicyConfig(
        from_scratch={"model_type": "qwen2", **SMALL, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    )
    tokenizer = load_tokenizer(policy)
    tokenizer.save_pretrained(folder / "Qwen" / "Qwen2.5-1.5B-Instruct")
    load_model(policy, tokenizer).save_pretrained(folder / "Qwen" / "Qwen2.5-1.5B-Instruct")
    rows = [{"question": f"What is {i} plus {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(40)]
    for split, part in (("train", rows[:32]), ("test", rows[32:])):
        file = folder / "openai" / "gsm8k" / "main" / f"{split}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(part).to_parquet(file)
    files = "\n".join(f"  - split: {split}\n    path: main/{split}-*" for split in ("train", "test"))
    (folder / "openai" / "gsm8k" / "README.md").write_text(
        f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}\n---\n"
    )
    _smaller(
        folder / "configs" / "gsm8k.yaml",
        data__steps=2,
        data__prompts_per_step=2,
        data__val_prompts=2,
        model__algorithm__group_size=2,
        model__sampling__max_completion_length=8,
        model__validation__samples=1,
        trainer__accelerator="cpu",
    )
    _run(_commands("Your own model"), folder)
    assert (folder / "runs" / "gsm8k" / "export" / "model.safetensors").is_file()
    assert {"adapter_model.safetensors", "grpo_pl.json"} <= {path.name for path in (folder / "my_model").iterdir()}


def test_all_commands_are_listed() -> None:
    listed = re.findall(r"^\| `grpo-pl (\w+)` \|", section(page("first_steps"), "All commands"), re.MULTILINE)
    assert sorted(listed) == sorted({**TRAINER_VERBS, **VERBS})
