"""Where an answer is read: what counts as a number, behind a pattern, in JSON, and what hostile texts cost."""

import json
from dataclasses import replace

import pytest

from grpo_pl.rewards import ExactReward, MathReward, PerSource
from grpo_pl.rewards.answer_reading import MOST_OBJECTS, is_plain_number, json_field, last_number
from grpo_pl.rewards.base import Score
from grpo_pl.rewards.voting import answer_classes

NUMBERS = {
    "There are 5 * 8 = 40": "40", "The answer is 40.": "40", "It is 40!": "40", "so...40": "40", "(40)": "40",
    "**40**": "40", "40 apples, not a dozen": "40", "it costs $1,000.50.": "1,000.50", "a loss of -$40": "-40",
    "x = -5": "-5", "x=−5": "−5", "12-5": "5", "12 - 5": "5", "f(2)-5": "5", ".5": ".5", "3/4 of it": "3/4",
    r"\frac{3}{4}": r"\frac{3}{4}", r"5 or \dfrac{ 3 }{ 4 }": r"\dfrac{ 3 }{ 4 }", "50%": "50%", r"50 \%": r"50 \%",
    "1e5": "1e5", "5kg": "5kg", "40\n\n": "40",
    # one number that is not the last part of itself
    "at 12:30": "12:30", "3,5": "3,5", "1,2,3": "1,2,3", "2^10": "2^10", "2**10": "2**10", "2^{10}": "2^{10}",
    "5²": "5²", "1.2.3": "1.2.3",
    # no numbers
    "x2": "", "B12 and v1.5": "", "the 5th": "", "the 1ST": "", "forty": "", "": "", "\\boxed{}": "",
    # the last one, whatever it is
    "40 in 3 days": "3", "40, 41, 42": "42", "40 on the 5th": "40",
}  # fmt: skip


@pytest.mark.parametrize(("text", "number"), NUMBERS.items())
def test_the_last_number(text: str, number: str) -> None:
    assert last_number(text) == number
    assert last_number(f"First 7. {text}") == (number or "7")


@pytest.mark.parametrize(
    ("text", "gold", "value"),
    [
        ("5 * 8 = 40.", "40", 1.0), ("It is 1,000 in all.", "1000", 1.0), ("So -$40", "-40", 1.0),
        ("So $40 dollars", "40", 1.0), ("exactly 0.5", "1/2", 1.0), (r"exactly \frac{1}{2}", "0.5", 1.0),
        ("5kg", "5", 1.0), ("<think>7 or 8?</think>40", "40", 1.0), ("40</think>41", "41", 1.0),
        # a part of something else is no answer
        ("3,5", "5", 0.0), ("at 12:30", "30", 0.0), ("2^10", "10", 0.0), ("2**10", "10", 0.0), ("5²", "5", 0.0),
        ("12-5", "7", 0.0), ("84/7", "12", 0.0), ("2x", "2", 0.0), ("10k", "10", 0.0),
        # a list of guesses is its last one
        ("1 2 3 4 5 6 7 8 9", "5", 0.0), ("40 or 41", "40", 0.0),
    ],
)  # fmt: skip
def test_what_the_last_number_is_worth(reward: MathReward, text: str, gold: str, value: float) -> None:
    (score,) = replace(reward, answer_in="last_number")([text], [gold], {})
    assert score.value == value, score


@pytest.mark.parametrize("text", ["", "no idea", "<think>40", "<think>40</think>forty", "40<think>41", "the 5th"])
def test_without_a_number_there_is_no_answer(reward: MathReward, text: str) -> None:
    expected = Score(1.0, "ok", "40") if text.startswith("40") else Score(0.0, "no_answer")
    reward = replace(reward, answer_in="last_number")
    assert reward([text, text], ["40", ""], {}) == [expected, Score(None, "bad_gold", "empty")]


def exact(text: str, gold: str = "40", **settings: str) -> Score:
    return ExactReward(**settings)([text], [gold], {})[0]  # type: ignore[arg-type]


def test_a_pattern_takes_its_group_or_else_the_rest_of_the_line() -> None:
    group = {"answer_in": "pattern", "answer_pattern": r"(?i)answer is\s+(\d+)"}
    assert exact("The Answer is 39. No, the answer is 40, surely.", **group) == Score(1.0, "ok", "40")
    assert exact("The answer is forty.", **group) == Score(0.0, "no_answer")
    rest = {"answer_in": "pattern", "answer_pattern": "####"}
    assert exact("work\n#### 40\nmore", **rest).value == 1.0
    assert exact("#### 40\n####", **rest) == Score(0.0, "no_answer")
    assert exact("<think>#### 40</think>", **rest) == Score(0.0, "no_answer")
    optional = {"answer_in": "pattern", "answer_pattern": "answer(?: is (.+))?"}
    assert exact("the answer", **optional) == Score(0.0, "no_answer")


def test_a_pattern_that_takes_exponential_time_is_given_up(reward: MathReward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_pl.rewards.answer_reading.PATTERN_SECONDS", 0.1)
    hang = {"answer_in": "pattern", "answer_pattern": r"((?:a|aa)+)$"}
    score = exact("a" * 200 + "!", **hang)
    assert (score.value, score.status) == (0.0, "timeout") and "more than 0.1 s" in score.detail
    math = replace(reward, **hang)  # type: ignore[arg-type]
    late, fine, bad = math(["a" * 200 + "!", "a", "a" * 200 + "!"], ["5", "a", ""], {})
    assert (late.value, late.status) == (0.0, "timeout") and fine.value == 1.0 and bad.status == "bad_gold"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('{"answer": 40}', "40"), ('Here: {"answer": "40"} as asked', "40"),
        ('```json\n{"work": [1, 2], "answer": 40.0}\n```', "40.0"), ('{"answer": 39} {"answer": 40}', "40"),
        ('{"answer": 40} {"other": 1}', "40"), ('{"a": {"answer": 39}, "answer": 40}', "40"),
        ('{"answer": 39, "answer": 40}', "40"), (r'\frac{1}{2} {"answer": "\\frac{1}{2}"}', r"\frac{1}{2}"),
        ('{"answer": 40', ""), ('{"answer": null}', ""), ('{"answer": true}', ""), ('{"answer": [40]}', ""),
        ('{"answer": NaN}', ""), ('{"a": {"answer": 40}}', ""), ("{answer: 40}", ""), ("{'answer': 40}", ""),
        ("40", ""), ('{"answer": ' + "7" * 5000 + "}", "7" * 5000), ('{"a": ' * 5000 + "40" + "}" * 5000, ""),
        ('{"a"' * MOST_OBJECTS + '{"answer": 40}', ""), ('{"a"' * (MOST_OBJECTS - 1) + '{"answer": 40}', "40"),
    ],
)  # fmt: skip
def test_a_field_of_the_last_json_object(text: str, answer: str) -> None:
    assert json_field(text, "answer").text == answer


def test_a_field_has_the_name_that_was_set() -> None:
    score = exact('{"answer": 39, "result": 40}', answer_in="json", answer_field="result")
    assert score == Score(1.0, "ok", "40")
    assert exact('{"result": [40]}', answer_in="json", answer_field="result").detail == (
        "the field 'result' holds neither a text nor a number"
    )


@pytest.mark.parametrize(
    ("text", "value", "detail"),
    [
        ("5 then \\boxed{40} in 3 days", 1.0, "40: from the last box"),
        ("40 \\boxed{", 0.0, "from the last box"),  # a cut-off box is no answer, here as elsewhere
        ("<answer>It is 40</answer> 3", 1.0, "40: from <answer>"),
        ("<answer>forty</answer> 40", 0.0, "from <answer>"),
        ("It is 40", 1.0, "40: from the last number"),
        ("It is 41", 0.0, "41: from the last number"),
        ("forty", 0.0, "from the last number"),
    ],
)
def test_auto_says_what_it_took(reward: MathReward, text: str, value: float, detail: str) -> None:
    math = replace(reward, answer_in="auto")([text], ["40"], {})[0]
    assert (math.value, math.detail) == (value, detail)
    own = exact(text, answer_in="auto")
    assert (own.value, own.detail) == (value, detail)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"answer_in": "last"}, "answer_in is 'last': choose one of box, last_number, pattern, json, auto"),
        ({"answer_in": "pattern"}, "answer_pattern is None: give answer_pattern"),
        ({"answer_pattern": "x"}, "answer_in is 'box' and answer_pattern is 'x'"),
        ({"answer_in": "pattern", "answer_pattern": "("}, "'\\(' is no regular expression"),
        ({"answer_in": "pattern", "answer_pattern": "(a)(b)"}, "has 2 groups: mark the answer by one"),
        ({"answer_field": "x"}, "answer_field is 'x', which needs `answer_in: json`"),
    ],
)
@pytest.mark.parametrize("kind", [MathReward, ExactReward])
def test_settings_that_say_no_place_are_refused(kind: type, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)


def test_a_majority_votes_over_the_answers_that_were_read(reward: MathReward) -> None:
    reward = replace(reward, answer_in="last_number")
    completions = ["so 7 of 41", "41", "it is 40", "none", "41.0", "39 left"]
    golds = ["40"] * 6
    scores = reward(completions, golds, {})
    same = {"completions": completions, "scores": scores, "columns": {}, "group_size": 6}
    assert answer_classes(reward, **same) == [1, 1, 0, -1, 1, 2]  # type: ignore[arg-type]
    sources = {**same, "columns": {"source": ["a"] * 6}}
    assert answer_classes(PerSource(rewards={"a": reward}), **sources) == [1, 1, 0, -1, 1, 2]  # type: ignore[arg-type]


def test_plain_numbers_are_found_as_they_are() -> None:
    for gold in ("5", "-5", "0.5", "1000"):
        assert is_plain_number(gold) and last_number(f"It is {gold}.") == gold
    assert not any(map(is_plain_number, ("15:25", "1/2", "1,000", "5 m", "five", "", "x", "1e5", "(1, 2)")))


def test_the_settings_are_part_of_an_export() -> None:
    settings = {"answer_in": "pattern", "answer_pattern": "is (.*)"}
    spec = ExactReward(**settings).spec()  # type: ignore[arg-type]
    assert spec["init_args"].items() >= settings.items() and json.dumps(spec)
