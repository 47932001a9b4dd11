"""Against a real HTTP server on loopback that answers in JSON, refuses, rambles and is gone."""

import json
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")

from grpo_pl.extras.judges.rubric import INSTRUCTIONS, read_verdict, rubric_value
from grpo_pl.rewards import RubricReward
from grpo_pl.rewards.base import MissingColumn
from tests.rewards.endpoint import FORGED, Endpoint, Handler

POLITE, SHORT, RUDE = "It is polite.", "It has at most ten words.", "It insults the reader."
CRITERIA = {POLITE: 3.0, SHORT: 1.0, RUDE: -2.0}


@pytest.fixture
def rubric(endpoint: Endpoint, tmp_path: Path) -> Callable[..., RubricReward]:
    def make(**options: Any) -> RubricReward:
        given = {"criteria": CRITERIA, "time_limit_s": 20.0, "retries": 1, "cache_file": str(tmp_path / "v.sqlite")}
        return RubricReward(model="judge", base_url=endpoint.url, **{**given, **options})

    return make


def _meets(*criteria: str) -> Callable[[Handler, dict[str, Any]], None]:
    """An endpoint by which a response meets these criteria and no others."""

    def behave(handler: Handler, request: dict[str, Any]) -> None:
        text = request["messages"][1]["content"]
        asked = text.rpartition("<criterion>\n")[2].partition("\n</criterion>")[0]
        handler.say(json.dumps({"explanation": "so", "met": asked in criteria}))

    return behave


def _one(reward: RubricReward, text: str = "Thank you!", **columns: Any) -> tuple[float | None, str, str]:
    (score,) = reward([text], ["42"], {"prompt": ["Q?"], **{name: [cell] for name, cell in columns.items()}})
    return score.value, score.status, score.detail


@pytest.mark.parametrize(
    ("met", "value"),
    [
        ((), 0.0),
        ((POLITE,), 3 / 4),
        ((POLITE, SHORT), 1.0),
        ((POLITE, RUDE), 1 / 4),  # (3 - 2) / (3 + 1)
        ((SHORT, RUDE), 0.0),  # (1 - 2) / 4 is clipped
        ((POLITE, SHORT, RUDE), 1 / 2),
    ],
)
def test_weights_of_what_is_met_over_all_positive_weights(met: tuple[str, ...], value: float) -> None:
    assert rubric_value({c: c in met for c in CRITERIA}, CRITERIA) == value


def test_each_criterion_is_a_question_of_its_own(endpoint: Endpoint, rubric: Any) -> None:
    endpoint.behave = _meets(POLITE, RUDE)
    value, status, detail = _one(rubric(), "<think>all criteria are met</think>Thank you!")
    assert (value, status) == (0.25, "wrong")
    assert detail == f"not met: {SHORT}; met: {RUDE}"
    assert len(endpoint.requests) == 3
    texts = sorted(request["messages"][1]["content"] for request in endpoint.requests)
    assert all("all criteria" not in text and "42" not in text for text in texts)  # neither reasoning nor gold answer
    assert texts[1] == (
        f"<question>\nQ?\n</question>\n<response>\nThank you!\n</response>\n<criterion>\n{RUDE}\n</criterion>"
    )
    request = endpoint.requests[0]
    assert request["messages"][0]["content"] == INSTRUCTIONS
    assert (request["temperature"], request["response_format"]) == (0.0, {"type": "json_object"})


def test_the_gold_answer_and_the_plain_form_where_they_are_asked_for(endpoint: Endpoint, rubric: Any) -> None:
    endpoint.behave = _meets(*CRITERIA)
    _one(rubric(show_gold=True, json_mode=False))
    assert "<reference>\n42\n</reference>" in endpoint.requests[0]["messages"][1]["content"]
    assert "response_format" not in endpoint.requests[0]


def test_a_row_may_bring_its_own_criteria(endpoint: Endpoint, rubric: Any) -> None:
    own = [{"criterion": "It says 42.", "weight": 4}]
    endpoint.behave = _meets("It says 42.")
    reward = rubric(criteria={SHORT: 1.0}, column="rubric")
    assert _one(reward, rubric=own)[0] == 0.8
    assert _one(reward, rubric=json.dumps(own))[0] == 0.8
    huge = [{"criterion": "x", "weight": 10**400}], [{"criterion": c, "weight": 1e308} for c in "xy"], "[" * 100_000
    for cell in ("no json", [{"criterion": "x"}], [{"criterion": "x", "weight": "much"}], 3, *huge):
        with pytest.raises(MissingColumn, match="must hold a list of objects with criterion and weight"):
            _one(reward, rubric=cell)
    with pytest.raises(MissingColumn, match="no column 'rubric'"):
        _one(reward)
    with pytest.raises(MissingColumn, match="at least one weight must be positive"):
        _one(rubric(criteria={}, column="rubric"), rubric=[{"criterion": "x", "weight": -1}])


def test_verdicts_are_kept_on_disk_and_shared(endpoint: Endpoint, rubric: Any) -> None:
    endpoint.behave = _meets(POLITE)
    first = _one(rubric())
    assert len(endpoint.requests) == 3
    assert _one(rubric()) == first  # another object, as in the next run
    assert len(endpoint.requests) == 3
    _one(rubric(), "Thank you very much!")
    assert len(endpoint.requests) == 6
    _one(rubric(criteria={POLITE: 1.0, "It rhymes.": 1.0}))  # only what is new is asked
    assert len(endpoint.requests) == 7
    _one(rubric(max_tokens=200))  # a judge with other settings
    assert len(endpoint.requests) == 10


def test_equal_completions_of_a_batch_are_asked_once(endpoint: Endpoint, rubric: Any) -> None:
    endpoint.behave = _meets(POLITE)
    scores = rubric()(["a", "b", "a", "a"], [""] * 4, {"question": ["Q?"] * 4})
    assert [score.value for score in scores] == [0.75] * 4
    assert len(endpoint.requests) == 6


def test_several_threads_and_objects_share_one_file(endpoint: Endpoint, rubric: Any, tmp_path: Path) -> None:
    endpoint.behave = _meets(POLITE)
    rewards = [rubric() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        values = [f.result()[0] for f in [threads.submit(_one, r, f"text {i}") for i, r in enumerate(rewards * 4)]]
    assert values == [0.75] * 16
    with sqlite3.connect(tmp_path / "v.sqlite") as table:
        assert table.execute("SELECT COUNT(*) FROM verdicts").fetchone() == (48,)


def test_a_spent_budget_is_nobodys_fault_and_sends_nothing_more(endpoint: Endpoint, rubric: Any) -> None:
    endpoint.behave = _meets(POLITE, SHORT)
    reward = rubric(max_requests=4)
    assert _one(reward, "first")[0] == 1.0
    value, status, detail = _one(reward, "second")
    assert (value, status) == (None, "unavailable")
    assert "max_requests=4 are spent" in detail
    assert len(endpoint.requests) == 4
    assert _one(reward, "first")[0] == 1.0  # what is known costs nothing


def test_one_lost_criterion_takes_the_value_but_not_the_other_verdicts(endpoint: Endpoint, rubric: Any) -> None:
    def behave(handler: Handler, request: dict[str, Any]) -> None:
        if RUDE in request["messages"][1]["content"]:
            handler.reply(503, "{}")
        else:
            handler.say('{"met": true}')

    endpoint.behave = behave
    assert _one(rubric())[:2] == (None, "unavailable")
    endpoint.behave, before = _meets(), len(endpoint.requests)
    assert _one(rubric())[0] == 1.0
    assert len(endpoint.requests) == before + 1


@pytest.mark.parametrize(
    ("reply", "met"),
    [
        ('{"met": true}', True), ('{"explanation": "the text says {\\"met\\": true}", "met": false}', False),
        ('```json\n{"met": true}\n```', True), ('{"met": "true"}', None), ('{"met": 1}', None), ("true", None),
        ('[{"met": true}]', None), ('The reply is {"met": true}', None), ('{"met": true} {"met": false}', None),
        ("[" * 100_000, None), ("", None),
    ],
)  # fmt: skip
def test_only_one_whole_object_is_a_verdict(reply: str, met: bool | None) -> None:
    assert read_verdict(reply) is met


def test_a_judge_that_rambles_counts_against_the_response(endpoint: Endpoint, rubric: Any) -> None:
    endpoint.behave = lambda handler, request: handler.say("All criteria are met!")
    value, status, detail = _one(rubric())
    assert (value, status) == (0.0, "wrong")
    assert detail == f"not met: {POLITE}; not met: {SHORT}; met: {RUDE}"
    endpoint.behave = _meets(POLITE, SHORT)
    assert _one(rubric())[0] == 1.0  # it was no verdict, so nothing was kept


def test_no_text_can_forge_a_part(endpoint: Endpoint, rubric: Any) -> None:
    forged = FORGED.replace("candidate", "response").replace("reference", "criterion")
    reward = rubric(criteria={f"It is right.{forged}": 1.0}, show_gold=True)
    reward([f"5{forged}"], [f"8{forged}"], {"question": [f"2+6?{forged}"]})
    parts = endpoint.requests[0]["messages"][1]["content"].split("<")[1:]
    names = ["question", "reference", "response", "criterion"]
    assert [part.split(">")[0] for part in parts] == [tag for name in names for tag in (name, f"/{name}")]


def test_nothing_to_judge_and_too_much_of_it(endpoint: Endpoint, rubric: Any) -> None:
    assert _one(rubric(), "<think>only thoughts</think>  ")[:2] == (0.0, "no_answer")
    assert _one(rubric(max_response_chars=10), "x" * 11)[:2] == (0.0, "too_long")
    assert not endpoint.requests


def test_settings_that_cannot_be_meant_are_refused(rubric: Any, tmp_path: Path) -> None:
    for message, options in {
        "criteria is empty": {"criteria": {}},
        "at least one weight must be positive": {"criteria": {RUDE: -1.0}},
        "weights must be finite": {"criteria": {POLITE: float("inf")}},
        "max_requests must be at least 0": {"max_requests": -1},
        "reward 'rubric' needs concurrency >= 1, got 0": {"concurrency": 0},
    }.items():
        with pytest.raises(ValueError, match=message):
            rubric(**options)
    other = tmp_path / "notes.txt"
    other.write_text("no database, but notes\n" * 100)
    with pytest.raises(ValueError, match=r"notes\.txt holds no verdicts"):
        rubric(cache_file=str(other)).check()
    rubric().check()


def test_a_cache_that_cannot_be_written_costs_no_score(endpoint: Endpoint, rubric: Any, tmp_path: Path) -> None:
    endpoint.behave = _meets(POLITE)
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="cannot be written"):
        assert _one(rubric(cache_file=str(tmp_path / "file" / "v.sqlite")))[0] == 0.75
