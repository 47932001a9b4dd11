"""The recipes for real models and data, with a small local model and a Parquet file in GSM8K's columns."""

import csv
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from jsonargparse import ArgumentParser

from grpo_pl.module import GRPOModule
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer

CONFIGS = Path(__file__).parents[1] / "configs"
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMALL = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    policy = PolicyConfig(from_scratch=SMALL)
    tokenizer = load_tokenizer(policy)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    load_model(policy, tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 problems whose answers are written as in GSM8K."""
    folder = tmp_path_factory.mktemp("gsm8k")
    rows = [
        {
            "question": f"Ann has {i} apples and buys {i + 1} more. How many apples does Ann have?",
            "answer": f"Ann has {i} + {i + 1} = <<{i}+{i + 1}={2 * i + 1}>>{2 * i + 1} apples.\n#### {2 * i + 1}",
        }
        for i in range(30)
    ]
    datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    return folder / "train.parquet"


@pytest.mark.parametrize("recipe", ["gsm8k", "r1_zero"])
def test_a_recipe_takes_three_steps_with_a_local_model_and_file(
    fresh_command_line: Any, model_folder: Path, gsm8k: Path, recipe: str
) -> None:
    outcome = fresh_command_line(
        "fit",
        *("--config", CONFIGS / f"{recipe}.yaml"),
        f"--model.policy.path={model_folder}",
        f"--data.source.path={gsm8k}",
        *("--data.source.subset=null", "--data.source.val_split=null", "--data.source.val_share=0.2"),
        *("--data.steps=3", "--data.prompts_per_step=2", "--data.val_prompts=2", "--model.validation.samples=1"),
        *("--model.algorithm.group_size=2", "--model.sampling.max_completion_length=8"),
        *("--trainer.accelerator=cpu", "--trainer.val_check_interval=3"),
    )
    assert outcome.status == 0, outcome.err
    run = fresh_command_line.runs / recipe
    with (run / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["reward"]]
    assert len(rows) == 3
    assert {"rewards/math/mean", "completions/reflection_rate"} <= rows[0].keys()
    assert (run / "export" / "model.safetensors").is_file()
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["source"]["init_args"]["question"] == "question"


@pytest.mark.parametrize("overlay", sorted((CONFIGS / "template").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_template_overlay_sets_every_field_of_the_template(overlay: Path) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(GRPOModule, "model", instantiate=False, skip={"policy", "rewards"})
    chosen = yaml.safe_load(overlay.read_text())
    template = parser.parse_object(chosen).model.template
    assert set(chosen["model"]["template"]) == set(vars(template))
    assert "{question}" in template.user


def test_the_think_answer_overlay_is_the_template_of_r1_zero() -> None:
    overlay = yaml.safe_load((CONFIGS / "template" / "think_answer.yaml").read_text())["model"]["template"]
    recipe = yaml.safe_load((CONFIGS / "r1_zero.yaml").read_text())["model"]["template"]
    assert {key: overlay[key] for key in recipe} == recipe
