"""The recipes for real models and data, with a small local model and a Parquet file in GSM8K's columns."""

import csv
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from jsonargparse import ArgumentParser

from grpo_pl.config.objects import build
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.rewards import FormatReward, LenientAnswerReward, StrictAnswerReward
from grpo_pl.rewards.base import Reward
from grpo_pl.training.module import GRPOModule

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


def _parts(config: str, key: str) -> Any:
    """What a configuration names, built: rewards, or a judge."""
    loaded = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    for name in key.split("."):
        loaded = loaded[name]
    return (
        [build(Reward, spec, "reward") for spec in loaded]
        if isinstance(loaded, list)
        else build(Reward, loaded, "reward")
    )


def test_the_demonstrations_of_the_quickstart_are_worth_everything_there() -> None:
    source = ArithmeticPrompts(digits=3, min_digits=3)
    problems = source.prompts(0, count=20)
    texts = [source.demonstration(problem, random.Random(i)) for i, problem in enumerate(problems)]
    for reward in [*_parts("quickstart", "model.rewards"), StrictAnswerReward(), LenientAnswerReward()]:
        scores = reward(texts, [problem.answer for problem in problems], {})
        assert {score.value for score in scores} == {1.0}, reward.name
        reward.close()


def test_r1_zero_takes_an_answer_in_a_sentence_and_the_quickstart_does_not() -> None:
    text = "<think>6 * 7</think> <answer>The answer is \\boxed{42}.</answer>"
    for config, value in (("r1_zero", 1.0), ("quickstart", 0.0)):
        form = next(reward for reward in _parts(config, "model.rewards") if isinstance(reward, FormatReward))
        assert form([text], ["42"], {})[0].value == value
    assert _parts("r1_zero", "watch.strict")([text], ["42"], {})[0].value == 1.0
    assert StrictAnswerReward()([text], ["42"], {})[0].value == 0.0


def test_sorting_starts_with_digits_alone_and_its_watch_sees_no_new_form(fresh_command_line: Any) -> None:
    """Its gold answers are written with spaces, which the vocabulary of the policy does without."""
    outcome = fresh_command_line(
        *("fit", "--config", CONFIGS / "sorting.yaml", "--data.steps=16", "--data.prompts_per_step=4"),
        *("--data.val_prompts=2", "--data.val_batch_size=2", "--trainer.val_check_interval=16"),
    )
    assert outcome.status == 0, outcome.err
    with (fresh_command_line.runs / "sorting" / "metrics.csv").open(newline="") as file:
        drift = [row["watch/form_drift"] for row in csv.DictReader(file) if row["watch/form_drift"]]
    assert len(drift) == 6
    assert set(map(float, drift)) == {0.0}
