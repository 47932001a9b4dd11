"""The YAML under a finding: what it sets, from the run's own problems, rewards and tokenizer."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_pl.data.tables import TablePrompts
from grpo_pl.data.tasks.word_problems import WordProblems
from grpo_pl.extras.doctor.fixes import with_fixes
from grpo_pl.extras.doctor.run_statistics import Finding
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.template import ANSWER_TAGS, THINK_TAGS, Example, PromptTemplate
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.rewards import ExactReward, FormatReward, MathReward, Reward
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import SamplingParams
from tests.conftest import TINY_POLICY, CommandLine


def save_model(folder: Path, context: int) -> Path:
    """A model in a folder, whose tokenizer knows another end than its own."""
    tokenizer = character_tokenizer([*THINK_TAGS, *ANSWER_TAGS, "<|im_end|>"])
    tokenizer.save_pretrained(folder)
    policy = PolicyConfig(from_scratch={**TINY_POLICY, "max_position_embeddings": context})
    load_model(policy, tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), 100)


def mended(code: str, folder: Path, rewards: Sequence[Reward], source: Any = None, **settings: Any) -> Finding:
    """A finding with the YAML that may mend it; another one has none."""
    module = GRPOModule(policy=PolicyConfig(path=str(folder)), rewards=list(rewards), **settings)
    module.tokenizer = load_tokenizer(module.policy_config)
    source = source or WordProblems()
    found = [Finding(each, "", 0.0, "", "") for each in (code, "D40")]
    finding, untouched = with_fixes(found, module, source.prompts(0, count=32), source)
    assert untouched.fix == ""
    return finding


def fix(*given: Any, **settings: Any) -> tuple[Any, str]:
    """What YAML is under a finding, read, and the comment behind it."""
    read, comment = mended(*given, **settings).fix.partition("# Or")[::2]
    return yaml.safe_load(read), comment


def test_a_form_that_is_never_reached_is_shown_and_read_elsewhere(folder: Path) -> None:
    tree, comment = fix("D11", folder, [MathReward(), FormatReward(weight=0.3)])
    first, second = tree["model"]["template"]["examples"]
    for example in (first, second):  # the shortest questions, with the first form that boxes
        assert example["completion"].startswith("\\boxed{") and example["question"][-1] in "?."
    math, form = tree["model"]["rewards"]
    assert math["class_path"] == "grpo_pl.rewards.MathReward" and form["class_path"] == "grpo_pl.rewards.FormatReward"
    assert math["init_args"] == {"correctness": True, "answer_in": "last_number"}
    assert form["init_args"] == {"weight": 0.3, "correctness": False, "partial": True}
    assert "400 demonstrations of the data set" in comment


def test_where_the_reward_takes_them_the_demonstrations_are_shown(folder: Path) -> None:
    tree, _ = fix("D11", folder, [MathReward(answer_in="last_number")])
    assert "rewards" not in tree["model"]
    assert all("The answer is" in example["completion"] for example in tree["model"]["template"]["examples"])


def test_text_answers_stay_in_boxes_and_a_file_is_asked_for(folder: Path, tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyABCDEFGHIJKLMNOPQ"
    rows = [f'{{"question": "what comes after {c}?", "answer": "{chr(ord(c) + 1)}"}}\n' for c in letters]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    source = TablePrompts(path=str(tmp_path / "rows.jsonl"), val_share=0.1)
    tree, comment = fix("D11", folder, [ExactReward(correctness=True)], source)
    assert tree["model"].keys() == {"template"}
    assert "demonstrations: solved.jsonl" in comment and '{"prompt": …, "completion": …}' in comment


def test_a_limit_is_doubled_as_far_as_the_context_goes_and_examples_are_left_alone(folder: Path) -> None:
    for length, longer in ((20, 40), (30, 50), (50, None)):
        sampling = SamplingParams(max_completion_length=length)
        tree, _ = fix("D10", folder, [MathReward(answer_in="last_number")], sampling=sampling)
        assert tree["model"].get("sampling") == (longer and {"max_completion_length": longer})
        assert len(tree["model"]["template"]["examples"]) == 2
    template = PromptTemplate(examples=[Example(question="1 + 1", completion="\\boxed{2}")])
    tree, _ = fix("D10", folder, [MathReward()], template=template, sampling=SamplingParams(max_completion_length=20))
    assert tree == {"model": {"sampling": {"max_completion_length": 40}}}


def test_ends_that_the_tokenizer_knows_are_named(folder: Path) -> None:
    tree, _ = fix("D12", folder, [MathReward()])
    tokenizer = load_tokenizer(PolicyConfig(path=str(folder)))
    assert tree["model"]["sampling"] == {"stop_token_ids": [tokenizer.convert_tokens_to_ids("<|im_end|>")]}


@pytest.mark.parametrize("code", ["D11", *(pytest.param(code, marks=pytest.mark.slow) for code in ("D10", "D12"))])
def test_what_is_printed_is_pasted_loaded_and_trained(code: str, tmp_path: Path, command_line: CommandLine) -> None:
    """The YAML as the terminal shows it, and then the cold start in its comment, without the signs of a comment."""
    model = save_model(tmp_path / "model", 1024)
    rewards: list[Reward] = [MathReward(), FormatReward(weight=0.3)]
    finding = mended(code, model, rewards, sampling=SamplingParams(max_completion_length=8))
    printed = textwrap.dedent("\n".join(finding.with_fix().splitlines()[2:]))  # below the finding and its title
    files = {"it": printed}
    if code == "D11":
        _, comment = printed.split("# Or, instead of examples, ")
        files["cold"] = "\n".join(line.removeprefix("# ") for line in comment.splitlines()[1:])
        assert yaml.safe_load(files["cold"])["model"].keys() == {"cold_start"}
    base = command_line.config(
        "base",
        model__policy={"path": str(model)},
        model__rewards=[reward.spec() for reward in rewards],
        model__cold_start=None,
        model__sampling={"max_completion_length": 8},
        model__algorithm={"group_size": 2},
        model__max_tokens_per_microbatch=None,
        data__source={"class_path": "grpo_pl.data.tasks.word_problems.WordProblems"},
        **{"data__steps": 1, "data__prompts_per_step": 2, "data__val_prompts": 2, "trainer__val_check_interval": 1},
    )
    for name, text in files.items():
        (command_line.folder / f"{name}.yaml").write_text(text)
        quick = ["--model.cold_start.steps=2"] if name == "cold" else []
        command_line.done("fit", "--config", base, "--config", command_line.folder / f"{name}.yaml", *quick)
        run = sorted(command_line.runs.iterdir(), key=lambda one: one.stat().st_mtime)[-1]
        assert len((run / "completions.jsonl").read_text().splitlines()) == 4
        written = yaml.safe_load((run / "config.yaml").read_text())["model"]
        for part, value in yaml.safe_load(text)["model"].items():
            if part == "sampling":
                assert value.items() <= written[part].items()
            elif part == "template":
                assert written[part]["examples"] == value["examples"]
