import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForTokenClassification

from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts, scratchpad
from grpo_pl.rewards import ColumnArithmeticReward, ProcessModelReward, StepScores
from grpo_pl.rewards.process import column_steps, line_steps
from tests.rewards.tiny_models import save_tiny

RIGHT = "<think>7+5+0=12\n4+8+1=13\n3+2+1=6\n</think><answer>\\boxed{632}</answer>"


def steps(completion: str, gold: str = "632", prompt: str = "347+285=") -> StepScores:
    (scored,) = ColumnArithmeticReward().steps([completion], [gold], {"prompt": [prompt]})
    assert scored is not None
    return scored


def test_every_right_line_and_the_answer_are_worth_one() -> None:
    scored = steps(RIGHT)
    assert scored.values == (1.0, 1.0, 1.0, 1.0)
    texts = [RIGHT[:end] for end in scored.ends]
    assert texts[0] == "<think>7+5+0=12"
    assert texts[1].endswith("4+8+1=13")
    assert texts[3].endswith("\\boxed{632}")


@pytest.mark.parametrize(("operator", "a", "b"), [("+", 95, 8), ("-", 1003, 7), ("-", 63, 63), ("+", 0, 0)])
def test_the_rule_knows_the_format_of_the_arithmetic_prompts(operator: str, a: int, b: int) -> None:
    assert column_steps(a, operator, b) == scratchpad(a, operator, b)


def test_demonstrations_are_all_right() -> None:
    source = ArithmeticPrompts(operators="+-", scratchpad_share=1.0)
    for prompt in source.validation(20):
        completion = source.demonstration(prompt, random.Random(0))
        scored = steps(completion, prompt.answer, prompt.question)
        assert set(scored.values) == {1.0}


@pytest.mark.parametrize(
    ("completion", "values"),
    [
        (RIGHT.replace("4+8+1=13", "4+8+0=12"), (1.0, 0.0, 1.0, 1.0)),  # an early error spoils its own line alone
        (RIGHT.replace("\n</think>", "\n9+9+9=27\n</think>").replace("632", "633"), (1.0, 1.0, 1.0, 0.0, 0.0)),
        ("<think>7+5+0=12\n4+8", (1.0, 0.0)),  # a thought that was cut off is judged as far as it goes
    ],
)
def test_each_line_is_judged_by_itself(completion: str, values: tuple[float, ...]) -> None:
    assert steps(completion).values == values


def test_a_guess_has_one_step_and_silence_none() -> None:
    assert steps("<think></think><answer>\\boxed{632}</answer>") == StepScores((1.0,), (34,))
    assert steps("<think>") == StepScores((), ())


def test_a_box_command_without_a_box_is_no_answer_and_no_error() -> None:
    scored = steps("7+5+0=12\n\\boxed{632} \\boxed")
    assert scored.values == (1.0, 1.0)
    assert scored.ends[-1] == len("7+5+0=12\n\\boxed{632}")
    assert steps("\\boxed{632} \\boxed{") == StepScores((0.0,), (19,))


@pytest.mark.parametrize("prompt", ["1" * 5000, f"{'1' * 5000}+1=", f"1+{'1' * 101}="])
def test_numbers_that_nobody_adds_in_columns_cannot_be_judged(prompt: str) -> None:
    assert ColumnArithmeticReward().steps([RIGHT], ["632"], {"prompt": [prompt]}) == [None]


def test_as_an_outcome_it_is_the_share_of_right_steps() -> None:
    reward = ColumnArithmeticReward()
    columns = {"question": ["347+285="] * 3 + ["no problem", "3-5="]}
    completions = [RIGHT, RIGHT.replace("632", "633"), "<think>", RIGHT, RIGHT]
    scores = reward(completions, ["632"] * 5, {**columns, "prompt": ["1+1="] * 5})
    assert [s.value for s in scores] == [1.0, 0.75, 0.0, None, None]
    assert [s.status for s in scores] == ["ok", "wrong", "no_answer", "bad_gold", "bad_gold"]


def test_lines_end_at_their_last_visible_character() -> None:
    assert line_steps("a b \n\n c\nd") == [("a b", 3), ("c", 8), ("d", 10)]


@pytest.mark.parametrize(
    ("values", "ends"), [((1.0,), ()), ((1.0, 1.0), (3, 3)), ((1.0,), (0,)), ((float("nan"),), (3,))]
)
def test_inconsistent_step_scores_are_refused(values: tuple[float, ...], ends: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"steps|ends"):
        StepScores(values, ends)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny token classifier whose label 1 is likely exactly at digits."""
    folder = save_tiny(tmp_path_factory.mktemp("prm"), "LlamaForTokenClassification", width=16, num_labels=2)
    model = LlamaForTokenClassification.from_pretrained(folder)
    for layer in model.model.layers:  # leaves the embedding alone on the residual stream
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    direction = torch.zeros(16)
    direction[0] = 1.0
    digits = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(list("0123456789"))
    model.model.embed_tokens.weight.data[:] = -direction
    model.model.embed_tokens.weight.data[digits] = direction
    model.score.weight.data = torch.stack([-direction, direction])
    model.score.bias.data.zero_()
    model.save_pretrained(folder)
    return folder


def test_a_model_scores_the_last_token_of_each_step(model_folder: Path) -> None:
    reward = ProcessModelReward(model=str(model_folder), batch_size=2)
    completions = ["a=1\nb\n 22 ", "c", "", "5"]
    scored = reward.steps(completions, [""] * 4, {"prompt": ["12 ", "", "7", "long prompt "]})
    assert [s.ends for s in scored if s] == [(3, 5, 9), (1,), (), (1,)]
    assert [tuple(v > 0.5 for v in s.values) for s in scored if s] == [(True, False, True), (False,), (), (True,)]
    assert scored[0] is not None
    assert scored[0].values[0] == pytest.approx(1 - scored[0].values[1], abs=1e-6)
    outcome = reward(completions[:1], [""], {"prompt": ["12 "]})[0]
    assert outcome.value == pytest.approx(sum(scored[0].values) / 3)


def test_a_step_that_was_cut_off_leaves_no_score(model_folder: Path) -> None:
    reward = ProcessModelReward(model=str(model_folder), max_length=5)
    assert reward.steps(["a=1\nb=2", "a=1"], ["", ""], {})[0] is None
    assert reward.steps(["a=1"], [""], {})[0] is not None
    with pytest.raises(ValueError, match="label 7"):
        ProcessModelReward(model=str(model_folder), label=7).steps(["a"], [""], {})


def test_no_text_has_no_steps(model_folder: Path) -> None:
    assert ProcessModelReward(model=str(model_folder)).steps(["", ""], ["", ""], {}) == [StepScores((), ())] * 2
