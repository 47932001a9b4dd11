"""The recipes for real data sets take a step on local files of the same columns, or on made-up problems."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.tokenizer import CHARACTERS

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    policy = PolicyConfig(from_scratch=SMALL, characters=f"{CHARACTERS}€")  # some problems are about euros
    tokenizer = load_tokenizer(policy)
    tokenizer.save_pretrained(folder)
    load_model(policy, tokenizer).save_pretrained(folder)
    return folder


def _run(command_line: Any, tree: dict[str, Any], model: Path, *flags: str) -> list[dict[str, str]]:
    """A step of a recipe, and the rows of its metrics."""
    tree["model"]["policy"] = {"path": str(model)}
    config = command_line.folder / "recipe.yaml"
    config.write_text(yaml.safe_dump(tree))
    done = command_line(
        "fit",
        f"--config={config}",
        *("--trainer.accelerator=cpu", "--trainer.precision=32", "--trainer.val_check_interval=1"),
        *("--data.steps=1", "--data.val_prompts=4", "--model.validation.samples=2", "--model.algorithm.group_size=2"),
        *("--model.sampling.max_completion_length=6", *flags),
    )
    assert done.status == 0, done.err
    with (command_line.runs / "recipe" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _table(folder: Path, name: str, rows: list[Mapping[str, Any]]) -> str:
    file = folder / f"{name}.parquet"
    datasets.Dataset.from_list(rows).to_parquet(file)
    return str(file)


def test_math(fresh_command_line: Any, model_folder: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load((CONFIGS / "math.yaml").read_text())
    train = [
        {"problem": f"Compute {i}/2.", "solution": rf"It is $\boxed{{\frac{{{i}}}{{2}}}}$.", "level": "1", "type": "x"}
        for i in range(12)
    ]
    test = [{"problem": f"Compute {i}/3.", "solution": "", "answer": rf"\frac{{{i}}}{{3}}"} for i in range(4)]
    tree["data"]["source"]["init_args"]["source"]["init_args"]["path"] = _table(tmp_path, "train", train)
    tree["data"]["validation_sets"]["math500"]["init_args"] |= {
        "path": _table(tmp_path, "test", test), "train_split": "train", "val_split": "train"
    }  # fmt: skip
    rows = _run(fresh_command_line, tree, model_folder, "--data.prompts_per_step=2")
    assert any(row.get("val/math500/pass@1") for row in rows)
    lines = (fresh_command_line.runs / "recipe" / "completions.jsonl").read_text().splitlines()
    golds = {json.loads(line)["answer"] for line in lines}
    assert golds <= {rf"\frac{{{i}}}{{2}}" for i in range(12)}  # the box, and nothing around it


def test_dapo_math(fresh_command_line: Any, model_folder: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load((CONFIGS / "dapo_math.yaml").read_text())
    train = [{"prompt": f"What is {i}+1?", "solution": str(i + 1), "reward_model": {"style": "r"}} for i in range(300)]
    aime = [{"id": i, "problem": f"What is {i}*7?", "answer": 7 * i} for i in range(3)]
    tree["data"]["source"]["init_args"] |= {"path": _table(tmp_path, "dapo", train), "subset": None, "val_share": 0.1}
    tree["data"]["validation_sets"]["aime24"]["init_args"]["path"] = _table(tmp_path, "aime", aime)
    rows = _run(fresh_command_line, tree, model_folder, "--data.prompts_per_step=2")
    assert any(row.get("val/aime24/maj@2") and row.get("val/pass@1") for row in rows)


def test_countdown(fresh_command_line: Any, model_folder: Path) -> None:
    pytest.importorskip("reasoning_gym")
    tree = yaml.safe_load((CONFIGS / "countdown.yaml").read_text())
    rows = _run(fresh_command_line, tree, model_folder, "--data.prompts_per_step=2")
    assert any(row.get("rewards/reasoning_gym/mean") for row in rows)


def test_a_mixture_reports_every_part(fresh_command_line: Any, model_folder: Path) -> None:
    pytest.importorskip("reasoning_gym")
    tree = yaml.safe_load((CONFIGS / "reasoning_gym_mixture.yaml").read_text())
    rows = _run(fresh_command_line, tree, model_folder, "--data.prompts_per_step=5", "--data.val_prompts=5")
    step = next(row for row in rows if row.get("reward"))
    parts = {"chain_sum", "gsm_symbolic", "countdown", "leg_counting"}
    assert {name for name in parts if step.get(f"sources/{name}/reward")} == parts
    held_out = next(row for row in rows if row.get("val/pass@1"))
    assert {name for name in parts if held_out.get(f"val/{name}/greedy")} == parts
    weights = {"gsm_symbolic": 2}
    mean = sum(weights.get(name, 1) * float(step[f"sources/{name}/reward"]) for name in parts) / 5
    assert float(step["reward"]) == pytest.approx(mean)


@pytest.mark.slow
def test_chain_sum_is_learned_from_nothing_on_a_cpu(fresh_command_line: Any) -> None:
    pytest.importorskip("reasoning_gym")
    done = fresh_command_line("fit", f"--config={CONFIGS / 'reasoning_gym.yaml'}")
    assert done.status == 0, done.err
    with (fresh_command_line.runs / "reasoning_gym" / "metrics.csv").open(newline="") as file:
        held_out = [float(row["val/pass@1"]) for row in csv.DictReader(file) if row.get("val/pass@1")]
    assert held_out[-1] - held_out[0] >= 0.2
