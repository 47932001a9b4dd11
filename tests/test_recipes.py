"""The recipes for real models and data take steps with a small local model, on Parquet files of the same columns."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from jsonargparse import ArgumentParser

from grpo_pl.config.objects import build
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.tokenizer import CHARACTERS
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
    "max_position_embeddings": 2048,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    policy = PolicyConfig(from_scratch=SMALL, characters=f"{CHARACTERS}€")  # some problems are about euros
    tokenizer = load_tokenizer(policy)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    load_model(policy, tokenizer).save_pretrained(folder)
    return folder


Rows = list[dict[str, str]]


@pytest.fixture
def train(
    fresh_command_line: Any, model_folder: Path, read_metrics: Callable[[Path], Rows]
) -> Callable[..., tuple[Path, Rows]]:
    """``train(tree, *flags)``: a few steps of a recipe; its run folder, and the rows of its metrics."""

    def run(tree: dict[str, Any], *flags: str) -> tuple[Path, Rows]:
        tree["model"]["policy"] = {"path": str(model_folder)}
        config = fresh_command_line.folder / "recipe.yaml"
        config.write_text(yaml.safe_dump(tree))
        fresh_command_line.done(
            "fit",
            f"--config={config}",
            *("--trainer.accelerator=cpu", "--trainer.precision=32", "--trainer.val_check_interval=1"),
            *("--data.steps=1", "--data.val_prompts=4", "--model.validation.samples=2"),
            *("--model.algorithm.group_size=2", "--model.sampling.max_completion_length=6", *flags),
        )
        folder = fresh_command_line.runs / "recipe"
        return folder, read_metrics(folder / "metrics.csv")

    return run


def _recipe(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))


def _table(folder: Path, name: str, rows: list[Mapping[str, Any]]) -> str:
    file = folder / f"{name}.parquet"
    datasets.Dataset.from_list(rows).to_parquet(file)
    return str(file)


@pytest.mark.parametrize("recipe", ["gsm8k", "r1_zero"])
def test_a_recipe_takes_three_steps_with_a_local_model_and_file(
    train: Callable[..., tuple[Path, Rows]], tmp_path: Path, recipe: str
) -> None:
    """30 problems whose answers are written as in GSM8K."""
    rows = [
        {
            "question": f"Ann has {i} apples and buys {i + 1} more. How many apples does Ann have?",
            "answer": f"Ann has {i} + {i + 1} = <<{i}+{i + 1}={2 * i + 1}>>{2 * i + 1} apples.\n#### {2 * i + 1}",
        }
        for i in range(30)
    ]
    run, rows = train(
        _recipe(recipe),
        f"--data.source.path={_table(tmp_path, 'train', rows)}",
        *("--data.source.subset=null", "--data.source.val_split=null", "--data.source.val_share=0.2"),
        *("--data.steps=3", "--data.prompts_per_step=2", "--trainer.val_check_interval=3"),
    )
    steps = [row for row in rows if "reward" in row]
    assert len(steps) == 3
    assert {"rewards/math/mean", "completions/reflection_rate"} <= steps[0].keys()
    assert (run / "export" / "model.safetensors").is_file()
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["source"]["init_args"]["question"] == "question"


def test_math(train: Callable[..., tuple[Path, Rows]], tmp_path: Path) -> None:
    tree = _recipe("math")
    problems = [
        {"problem": f"Compute {i}/2.", "solution": rf"It is $\boxed{{\frac{{{i}}}{{2}}}}$.", "level": "1", "type": "x"}
        for i in range(12)
    ]
    test = [{"problem": f"Compute {i}/3.", "solution": "", "answer": rf"\frac{{{i}}}{{3}}"} for i in range(4)]
    tree["data"]["source"]["init_args"]["source"]["init_args"]["path"] = _table(tmp_path, "train", problems)
    tree["data"]["validation_sets"]["math500"]["init_args"] |= {
        "path": _table(tmp_path, "test", test), "train_split": "train", "val_split": "train"
    }  # fmt: skip
    run, rows = train(tree, "--data.prompts_per_step=2")
    assert any(row.get("val/math500/pass@1") for row in rows)
    lines = (run / "completions.jsonl").read_text().splitlines()
    golds = {json.loads(line)["answer"] for line in lines}
    assert golds <= {rf"\frac{{{i}}}{{2}}" for i in range(12)}  # the box, and nothing around it


def test_dapo_math(train: Callable[..., tuple[Path, Rows]], tmp_path: Path) -> None:
    tree = _recipe("dapo_math")
    columns = {"reward_model": {"style": "rule"}}
    asked = [{"prompt": f"What is {i}+1?", "solution": str(i + 1), **columns} for i in range(300)]
    aime = [{"id": i, "problem": f"What is {i}*7?", "answer": 7 * i} for i in range(3)]
    path = _table(tmp_path, "dapo", asked)
    tree["data"]["source"]["init_args"] |= {"path": path, "subset": None, "val_share": 0.1}
    tree["data"]["validation_sets"]["aime24"]["init_args"]["path"] = _table(tmp_path, "aime", aime)
    _, rows = train(tree, "--data.prompts_per_step=2")
    assert any(row.get("val/aime24/maj@2") and row.get("val/pass@1") for row in rows)


@pytest.mark.slow  # the mixture has it as well
def test_countdown(train: Callable[..., tuple[Path, Rows]]) -> None:
    pytest.importorskip("reasoning_gym")
    tree = _recipe("countdown")
    _, rows = train(tree, "--data.prompts_per_step=2")
    assert any(row.get("rewards/reasoning_gym/mean") for row in rows)


def test_a_mixture_reports_every_part(train: Callable[..., tuple[Path, Rows]]) -> None:
    pytest.importorskip("reasoning_gym")
    tree = _recipe("reasoning_gym_mixture")
    _, rows = train(tree, "--data.prompts_per_step=5", "--data.val_prompts=5")
    step = next(row for row in rows if row.get("reward"))
    parts = {"chain_sum", "gsm_symbolic", "countdown", "leg_counting"}
    assert {name for name in parts if step.get(f"sources/{name}/reward")} == parts
    held_out = next(row for row in rows if row.get("val/pass@1"))
    assert {name for name in parts if held_out.get(f"val/{name}/greedy")} == parts
    weights = {"gsm_symbolic": 2}
    mean = sum(weights.get(name, 1) * float(step[f"sources/{name}/reward"]) for name in parts) / 5
    assert float(step["reward"]) == pytest.approx(mean)


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
    recipe = _recipe("r1_zero")["model"]["template"]
    assert {key: overlay[key] for key in recipe} == recipe


def _parts(config: str, key: str) -> Any:
    """What a configuration names, built: rewards, or a judge."""
    loaded: Any = _recipe(config)
    for name in key.split("."):
        loaded = loaded[name]
    built = [build(Reward, spec, "reward") for spec in (loaded if isinstance(loaded, list) else [loaded])]
    return built if isinstance(loaded, list) else built[0]


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


def test_sorting_starts_with_digits_alone_and_its_watch_sees_no_new_form(
    fresh_command_line: Any, read_metrics: Callable[[Path], Rows]
) -> None:
    """Its gold answers are written with spaces, which the vocabulary of the policy does without."""
    fresh_command_line.done(
        *("fit", "--config", CONFIGS / "sorting.yaml", "--data.steps=16", "--data.prompts_per_step=4"),
        *("--data.val_prompts=2", "--data.val_batch_size=2", "--trainer.val_check_interval=16"),
    )
    rows = read_metrics(fresh_command_line.runs / "sorting" / "metrics.csv")
    drift = [row["watch/form_drift"] for row in rows if "watch/form_drift" in row]
    assert len(drift) == 6
    assert set(map(float, drift)) == {0.0}
