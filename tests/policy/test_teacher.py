"""A teacher must read the very tokens that the policy writes."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from grpo_pl.policy.teacher import TeacherConfig, check_same_tokens
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.tokenizer import CHARACTERS, character_tokenizer

QUESTIONS = ["12+34=", "what is <think> for?"]


def _check(student: PreTrainedTokenizerBase, teacher: Any, template: PromptTemplate = PromptTemplate()) -> None:  # noqa: B008
    check_same_tokens(student, teacher, template, QUESTIONS, name="the teacher 'big'")


def test_the_same_tokenizer_is_accepted_also_with_further_tokens() -> None:
    student = character_tokenizer(["<think>"])
    _check(student, character_tokenizer(["<think>"]))
    _check(student, character_tokenizer(["<think>", "<further>"]))


def test_another_vocabulary_is_refused_with_its_first_difference() -> None:
    student = character_tokenizer(["<think>"])
    swapped = CHARACTERS.replace("+", "\0").replace("-", "+").replace("\0", "-")
    with pytest.raises(
        ValueError, match=r"the teacher 'big' has another vocabulary: 2 of the policy's 100 tokens .*'\+', "
    ):
        _check(student, character_tokenizer(["<think>"], swapped))
    with pytest.raises(ValueError, match="'<think>', 99 for the policy, which is not in it"):
        _check(student, character_tokenizer())


def test_prompts_that_are_cut_otherwise_are_refused_at_the_first_token_that_differs() -> None:
    """The same vocabulary, and a normalizer that turns capitals into small letters."""
    from tokenizers import normalizers

    student, teacher = character_tokenizer(["<think>"]), character_tokenizer(["<think>"])
    teacher.backend_tokenizer.normalizer = normalizers.Lowercase()
    _check(student, teacher)
    shouting = PromptTemplate(user="ADD {question}")
    with pytest.raises(
        ValueError, match=r"cuts prompts into other tokens: at token 1 of 'ADD 12\+34=' the policy reads 'ADD'"
    ):
        _check(student, teacher, shouting)


@pytest.mark.parametrize(
    ("name", "value"), [("rows_per_request", 0), ("retries", -1), ("time_limit_s", 0.0), ("time_limit_s", float("inf"))]
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"teacher needs {name} .*got {value}"):
        TeacherConfig(path="a", **{name: value})


def test_its_model_is_loaded_like_any_other(tmp_path: Path) -> None:
    config = TeacherConfig(path=str(tmp_path), attn_implementation="eager")
    assert (config.model.path, config.model.dtype, config.model.attn_implementation) == (str(tmp_path), "auto", "eager")
