import asyncio
import json
import math
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_pl.rewards import ExactReward, FunctionReward, PerSource, Reward
from grpo_pl.rewards.base import MissingColumn
from grpo_pl.rewards.batch import ScoredBatch, score_completions
from grpo_pl.rewards.function import load_function

HANG_S = 60.0
SOURCE = """
import asyncio

def accuracy(completions, answer, **kwargs):
    return [1.0 if gold in text else 0.0 for text, gold in zip(completions, answer)]

def by_column(prompts, completions, difficulty, **kwargs):
    return [len(p) + len(c) + d for p, c, d in zip(prompts, completions, difficulty)]

def no_kwargs(completions):
    return [None if c == "skip" else 0.5 for c in completions]

def chat(completions, **kwargs):
    return [float(len(c[0]["content"])) for c in completions]

def short(completions, **kwargs):
    return [1.0]

def infinite(completions, **kwargs):
    return [float("inf")] * len(completions)

def broken(completions, **kwargs):
    raise KeyError("solution")

def nameless(texts):
    return [1.0]

CONSTANT = 3

def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("tokens", [len(ids) for ids in completion_ids])
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps)
    log_metric("progress", 1.0)
    return [float(len(ids)) for ids in completion_ids]

def outside(completions, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("anything", [])
    log_metric("any", 1.0)
    return [1.0 if trainer_state is None else 0.0] * len(completions)

def talk(prompts, completions, **kwargs):
    return [float(p[-1]["role"] == "user" and c[0]["role"] == "assistant") for p, c in zip(prompts, completions)]

def twice(completions, log_extra):
    log_extra("note", ["a"] * len(completions))
    log_extra(column="note", values=["b"] * len(completions))
    return [0.0] * len(completions)

async def notes_too(completions, log_extra, **kwargs):
    log_extra("note", [text.upper() for text in completions])
    return [1.0] * len(completions)

def ragged(completions, log_extra):
    log_extra("note", ["a"])

LOOPS = set()

async def nap(completions, **kwargs):
    LOOPS.add(id(asyncio.get_running_loop()))
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]

async def late_and_broken(completions):
    await asyncio.sleep(0)
    raise KeyError("solution")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(SOURCE)
    return path


COLUMNS = {"prompt": ["pp", "p"], "difficulty": [10, 20], "more": [1, 2]}


@pytest.mark.parametrize(
    ("name", "options", "completions", "scores"),
    [
        ("accuracy", {}, ["a5", "b"], [(1.0, "ok"), (0.0, "wrong")]),
        ("by_column", {}, ["abc", ""], [(15.0, "ok"), (21.0, "ok")]),
        ("no_kwargs", {}, ["skip", "x"], [(None, "unavailable"), (0.5, "wrong")]),  # gets only what it names
        ("chat", {"conversational": True}, ["abc", ""], [(3.0, "ok"), (0.0, "wrong")]),  # as for TRL
    ],
)
def test_a_function_gets_completions_answers_and_columns(
    file: Path, name: str, options: dict, completions: list[str], scores: list
) -> None:
    found = FunctionReward(function=f"{file}:{name}", **options)(completions, ["5", "6"], COLUMNS)
    assert [(score.value, score.status) for score in found] == scores


def test_references_that_lead_nowhere_are_one_line_errors(tmp_path: Path, file: Path) -> None:
    assert load_function("os.path.join") is load_function("os.path:join")
    (tmp_path / "bad.py").write_text("raise RuntimeError('first\\nsecond')")
    for reference, match in {
        "nothing": "must look like", "no_such_module.f": "no_such_module", "os.path.no_such": "no such name",
        "no_such_file.py:f": "no file", f"{tmp_path}/bad.py:f": "RuntimeError: first second",
        f"{file}:CONSTANT": "int, which cannot be called", f"{file}:nameless": "completions",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=match) as error:
            FunctionReward(function=reference)
        assert repr(reference) in str(error.value)
        assert "\n" not in str(error.value)


def test_wrong_results_name_the_function(file: Path) -> None:
    with pytest.raises(ValueError, match=r"mine\.py:short.* 1 values for 2"):
        FunctionReward(function=f"{file}:short")(["a", "b"], ["", ""], {})
    with pytest.raises(ValueError, match=r"mine\.py:infinite.*inf"):
        FunctionReward(function=f"{file}:infinite")(["a"], [""], {})
    with pytest.raises(KeyError) as error:
        FunctionReward(function=f"{file}:broken")(["a"], [""], {})
    assert "mine.py:broken" in error.value.__notes__[0]


@pytest.mark.parametrize("name", ["short", "infinite", "broken", "ragged", "late_and_broken"])
@pytest.mark.parametrize("inside", [False, True])
def test_whatever_goes_wrong_names_the_function_and_not_the_reward_alone(file: Path, name: str, inside: bool) -> None:
    mine = FunctionReward(function=f"{file}:{name}")
    reward = PerSource(rewards={"x": mine}) if inside else mine
    with pytest.raises(Exception) as error:
        scored(reward, completions=["a", "b"], source=["x", "x"])
    assert error.value.__notes__ == [f"raised by the reward function '{file}:{name}'"]
    mine.on_error = "none"
    with pytest.warns(UserWarning, match=rf"mine\.py:{name}"):
        scored(reward, completions=["a", "b"], source=["x", "x"])


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("None", "returned None"), ("{'a': 1.0}", "returned a dict"), ("{1.0}", "returned a set"),
        ("'1'", "returned a str"), ("b'1'", "returned a bytes"), ("1.0", "returned a float"), ("['x']", "returned 'x'"),
        ("[[1.0]]", r"returned \[1.0\]"), ("sys.exit()", "sys.exit"), ("sys.exit(3)", r"sys\.exit\(3\)"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_numbers_names_the_function(kind: str, result: str, said: str, tmp_path: Path) -> None:
    word = "async " * (kind == "async")
    (tmp_path / "odd.py").write_text(f"import sys\n{word}def odd(completions):\n    return {result}\n")
    reward = FunctionReward(function=f"{tmp_path}/odd.py:odd")
    with pytest.raises((TypeError, RuntimeError), match=said) as error:
        scored(reward, completions=["a"])
    assert "odd.py:odd" in str(error.value) + "".join(error.value.__notes__)
    reward.on_error = "none"
    with pytest.warns(UserWarning, match=said):
        (scores,) = scored(reward, completions=["a"]).scores
    assert [(score.value, score.status) for score in scores] == [(None, "unavailable")]


def test_an_exception_that_cannot_be_shown_is_one_of_the_function(tmp_path: Path) -> None:
    (tmp_path / "mute.py").write_text(
        "class Mute(Exception):\n    def __str__(self):\n        raise KeyError('text')\n"
        "def mute(completions):\n    raise Mute()\n"
    )
    reward = FunctionReward(function=f"{tmp_path}/mute.py:mute", on_error="none")
    with pytest.warns(UserWarning, match="Mute"):
        (scores,) = scored(reward, completions=["a"]).scores
    assert scores[0].status == "unavailable"


def test_a_function_reward_survives_pickle(file: Path) -> None:
    twin = pickle.loads(pickle.dumps(FunctionReward(function=f"{file}:accuracy", name="mine")))
    assert twin.name == "mine"
    assert twin(["5"], ["5"], {})[0].value == 1.0


def scored(*rewards: Reward, completions: list[str], **columns: list[object]) -> ScoredBatch:
    return score_completions(
        rewards,
        completions=completions,
        answers=[""] * len(completions),
        columns=columns,
        trainer_state=lambda: SimpleNamespace(global_step=5, max_steps=10),
    )


def test_a_function_gets_tokens_state_and_places_to_note(file: Path) -> None:
    reward = FunctionReward(function=f"{file}:everything")
    batch = scored(reward, completions=["a", "bc"], prompt=["p", "q"], completion_ids=[[1, 9], [2, 3, 9]])
    assert [s.value for s in batch.scores[0]] == [2.0, 3.0]
    assert batch.extra == {"tokens": [2, 3]}
    assert batch.metrics == {"progress": [0.5, 1.0]}
    assert batch.select([1]).extra == {"tokens": [3]}


def test_outside_training_there_is_no_state_and_notes_go_nowhere(file: Path) -> None:
    reward = FunctionReward(function=f"{file}:outside")
    assert reward(["a"], [""], {})[0].value == 1.0


def test_a_column_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(MissingColumn, match="takes 'completion_ids', and there is no such column"):
        FunctionReward(function=f"{file}:everything")(["a"], [""], {"prompt": ["p"]})


@pytest.mark.parametrize("conversational", [None, True])
def test_prompts_of_a_conversation_come_as_messages(file: Path, conversational: bool | None) -> None:
    reward = FunctionReward(function=f"{file}:talk", conversational=conversational)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert reward(["a"], [""], {"prompt": ["text"], "prompt_messages": [messages]})[0].value == 1.0
    if conversational:
        assert reward(["a"], [""], {"prompt": ["text"], "question": ["u"]})[0].value == 1.0


def test_notes_that_do_not_fit_are_refused(file: Path) -> None:
    with pytest.raises(ValueError, match="got 1 values for 2"):
        scored(FunctionReward(function=f"{file}:ragged"), completions=["a", "b"])


def test_notes_of_one_name_are_all_kept(file: Path) -> None:
    twice = FunctionReward(function=f"{file}:twice", name="two")
    nap = FunctionReward(function=f"{file}:notes_too", name="nap")
    columns = {"prompt": ["p"] * 2, "completion_ids": [[1], [2]]}
    assert scored(nap, completions=["a", "b"], **columns).extra == {"note": ["A", "B"]}
    assert scored(nap, twice, completions=["a", "b"], **columns).extra == {
        "nap/note": ["A", "B"],
        "two/note": ["a", "a"],
        "two 2/note": ["b", "b"],
    }
    inner = PerSource(rewards={"x": twice, "y": nap}), FunctionReward(function=f"{file}:notes_too", name="z")
    assert scored(*inner, completions=["a", "b"], source=["x", "y"], **columns).extra == {
        "two/note": ["a", None],
        "two 2/note": ["b", None],
        "nap/note": [None, "B"],
        "z/note": ["A", "B"],
    }
    apart = PerSource(rewards={"x": FunctionReward(function=f"{file}:notes_too"), "y": nap})
    assert scored(apart, completions=["a", "b"], source=["x", "y"], **columns).extra == {"note": ["A", "B"]}


def test_notes_are_kept_as_json_has_them() -> None:
    given = [
        np.float32(0.5), np.int64(3), np.bool_(True), np.array([[1, 2]]), torch.tensor(2.5), torch.ones(2),
        math.nan, -math.inf, np.float64("nan"), {"a": (np.int8(1), [math.nan]), np.int64(7): {np.str_("t")}}, "text",
        None,
    ]  # fmt: skip

    def noting(completions: list[str], log_extra: Callable[..., None]) -> list[float]:
        log_extra("note", given)
        log_extra("array", np.arange(len(completions)))
        return [0.0] * len(completions)

    extra = scored(FunctionReward(function=noting), completions=["c"] * len(given)).extra
    plain = [0.5, 3, True, [[1, 2]], 2.5, [1.0, 1.0], None, None, None, {"a": [1, [None]], "7": ["t"]}, "text", None]
    written = {"note": plain, "array": list(range(len(given)))}
    assert json.dumps(extra, allow_nan=False) == json.dumps(written)


def test_rewards_inside_a_reward_note_their_own_rows(file: Path) -> None:
    everything, nothing = FunctionReward(function=f"{file}:everything"), ExactReward()
    reward = PerSource(rewards={"x": everything, "y": nothing})
    columns = {"prompt": ["", "", ""], "completion_ids": [[1], [1, 2], [1, 2, 3]], "source": ["x", "y", "x"]}
    assert scored(reward, completions=["a", "b", "c"], **columns).extra == {"tokens": [1, None, 3]}


class Meeting:
    """A reward function whose calls end only once all of them, and a function that is not asynchronous, have begun."""

    def __init__(self, count: int) -> None:
        self.missing = count
        self.everyone = asyncio.Event()
        self.waiting = threading.Event()

    async def __call__(self, completions: list[str], **kwargs: object) -> list[float]:
        self.missing -= 1
        if self.missing == 0:
            self.everyone.set()
            self.waiting.set()
        await asyncio.wait_for(self.everyone.wait(), HANG_S)
        return [2.0] * len(completions)

    def beside(self, completions: list[str], **kwargs: object) -> list[float]:
        assert self.waiting.wait(HANG_S)
        return [3.0] * len(completions)


@pytest.mark.parametrize("place", ["thread", "event loop", "one reward for each source"])
def test_asynchronous_rewards_run_together_and_beside_the_others(place: str) -> None:
    """Twelve calls that wait for each other: one after the other they would wait in vain."""
    meeting, texts = Meeting(12), ["ab"] * 13
    rewards: list[Reward] = [FunctionReward(function=meeting.beside, name="beside")]
    rewards += [FunctionReward(function=meeting, name=f"{i}") for i in range(12)]
    sources = [reward.name for reward in rewards]
    if place == "one reward for each source":
        rewards = [PerSource(rewards=dict(zip(sources, rewards, strict=True)))]

    async def inside() -> ScoredBatch:
        return scored(*rewards, completions=texts, source=list(sources))

    batch = asyncio.run(inside()) if place == "event loop" else scored(*rewards, completions=texts, source=sources)
    values = [[score.value for score in row] for row in batch.scores]
    expected = [3.0, *[2.0] * 12]
    assert values == ([expected] if len(rewards) == 1 else [[value] * 13 for value in expected])


def test_all_calls_share_one_event_loop_so_that_clients_live_on(file: Path) -> None:
    reward = FunctionReward(function=f"{file}:nap")
    for _ in range(2):
        reward(["x"], [""], {})
    assert len(reward._call.__globals__["LOOPS"]) == 1


def test_an_asynchronous_function_may_ask_another_reward(file: Path) -> None:
    asked = FunctionReward(function=f"{file}:nap")

    async def asking(completions: list[str]) -> list[float | None]:
        return [score.value for score in asked(completions, [""] * len(completions), {})]

    assert FunctionReward(function=asking)(["abc"], [""], {})[0].value == 3.0


def test_what_an_asynchronous_function_raises_names_it(file: Path) -> None:
    with pytest.raises(KeyError) as error:
        scored(FunctionReward(function=f"{file}:late_and_broken"), ExactReward(), completions=["a"])
    assert "mine.py:late_and_broken" in error.value.__notes__[0]


# --- function objects ---------------------------------------------------------------------------------------


def length(completions: list[str], **kwargs: object) -> list[float]:
    return [float(len(text)) for text in completions]


class Judge:
    async def __call__(self, completions: list[str], **kwargs: object) -> list[float]:
        return [1.0] * len(completions)


def test_function_objects_work_and_say_where_they_are() -> None:
    reward = FunctionReward(function=length)
    assert reward(["abc"], [""], {})[0].value == 3.0
    arguments = reward.spec()["init_args"]
    assert arguments["function"] == f"{__name__}:length"
    assert FunctionReward(**arguments)(["abc"], [""], {})[0].value == 3.0
    assert pickle.loads(pickle.dumps(reward))(["ab"], [""], {})[0].value == 2.0
    judge = FunctionReward(function=Judge())
    assert judge.asynchronous
    assert judge(["abc"], [""], {})[0].value == 1.0


def test_a_function_that_no_other_process_finds_trains_but_has_no_spec() -> None:
    for function in (lambda completions, **_: [1.0], partial(length), Judge()):
        reward = FunctionReward(function=function)
        reward(["abc"], [""], {})
        with pytest.raises(ValueError, match="cannot be found by name in another process"):
            reward.spec()
    with pytest.raises(ValueError, match="must be a reference or a function"):
        FunctionReward(function=3)
