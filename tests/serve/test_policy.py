"""The worker that decodes: each request gets its own tokens, and slots go to who has fewest."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.policy.trained import find_model
from grpo_pl.rollout.native.continuous import SequenceOptions
from grpo_pl.types import SamplingParams
from serve.follow import NewWeights
from serve.messages import Answer, Cancel, Draw, Drew, Failure, Followed, Part, ScorePrompt
from serve.policy import Decoding
from serve.worker import Origin

SLOTS = 4


class Ended(Exception):
    """Raised where the worker would wait for ever."""


class Script:
    """In place of the mailbox: messages at given turns, and what the worker tells."""

    def __init__(self, messages: list[tuple[int, Origin, Any]]) -> None:
        self._messages, self._turn = sorted(messages, key=lambda m: m[0]), 0
        self.told: list[tuple[Origin, Any]] = []

    def take(self, *, wait_for_one: bool) -> list[tuple[Origin, Any]]:
        if wait_for_one and not self._messages:
            raise Ended
        self._turn = max(self._turn + 1, self._messages[0][0] if wait_for_one else 0)
        due = [m[1:] for m in self._messages if m[0] <= self._turn]
        del self._messages[: len(due)]
        return due

    def wake(self, message: Any) -> None:
        self._messages.insert(0, (0, Origin(0, -1), message))

    def tell(self, origin: Origin, message: Any) -> None:
        self.told.append((origin, message))


@pytest.fixture(scope="module")
def weights(export: Path) -> NewWeights:
    return NewWeights.load(find_model(export), "cpu")


def _run(weights: NewWeights, messages: list[tuple[int, Origin, Any]], size: int = SLOTS) -> Script:
    script = Script(messages)
    decoding = Decoding(weights.model, weights, size, script)  # type: ignore[arg-type]
    with pytest.raises(Ended):
        decoding.run()
    assert (len(decoding._batch), decoding._owners, decoding._requests, decoding._line) == (0, {}, {}, {})
    return script


def _drawn(script: Script) -> dict[Origin, dict[int, list[int]]]:
    found: dict[Origin, dict[int, list[int]]] = {}
    for origin, message in script.told:
        if isinstance(message, Drew):
            for uid, i, tokens, *_ in zip(*message.columns, strict=True):
                found.setdefault(Origin(origin.consumer, uid), {}).setdefault(i, []).extend(tokens)
    return found


def _draw(keys: list[int], *, prompt: list[int] | None = None, length: int = 8, **more: Any) -> Draw:
    options = SequenceOptions(
        sampling=SamplingParams(max_completion_length=length), ignore_eos=more.pop("ignore", False)
    )
    return Draw([Part(prompt or [5, 6, 7], keys, options)], **more)


def _requests(chance: random.Random) -> Iterator[tuple[int, Origin, Draw, str]]:
    for number in range(60):
        length = chance.choice([1, 8, 8, 8, 24, 40])
        prompt = [chance.randrange(90) for _ in range(chance.randint(1, 12))]
        keys = [1000 * number + i for i in range(chance.choice([1, 1, 1, 2, 6]))]
        job = _draw(keys, prompt=prompt, length=length, ignore=chance.random() < 0.7)
        yield (
            chance.randrange(60),
            Origin(number % 2, number),
            job,
            chance.choice(["reads", "reads", "leaves", "stops one"]),
        )


@pytest.mark.parametrize("seed", range(3))
def test_each_request_gets_the_tokens_that_it_gets_alone(weights: NewWeights, seed: int) -> None:
    """Of two HTTP processes, in a batch that is always full, while others leave at any moment, and weights change to
    the same ones."""
    chance = random.Random(seed)
    asked = list(_requests(chance))
    messages: list[tuple[int, Origin, Any]] = [(turn, origin, job) for turn, origin, job, _ in asked]
    for turn, origin, _, does in asked:
        if does != "reads":
            indices = None if does == "leaves" else frozenset({0})
            messages.append((turn + chance.randrange(1, 12), origin, Cancel(indices)))
    messages += [(turn, Origin(0, -1), weights) for turn in (15, 40)]
    shared = _drawn(_run(weights, messages))
    for _, origin, job, does in asked:
        alone = _drawn(_run(weights, [(0, origin, job)], size=8))[origin]
        for i, tokens in alone.items():
            got = shared.get(origin, {}).get(i, [])
            whole = does == "reads" or (does == "stops one" and i > 0)
            assert got == (tokens if whole else tokens[: len(got)])


def test_free_slots_go_to_the_request_with_fewest_the_earliest_first(weights: NewWeights) -> None:
    large, second, third = (Origin(0, uid) for uid in range(3))
    script = _run(
        weights,
        [(0, large, _draw(list(range(20)), length=6)), (2, second, _draw([100])), (2, third, _draw([200, 201]))],
    )
    first = _order_of_first_tokens(script)
    assert first[:SLOTS] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert {uid for uid, _ in first[SLOTS : 2 * SLOTS]} >= {1, 2}  # as soon as places are free
    assert len(_drawn(script)[large]) == 20


def _order_of_first_tokens(script: Script) -> list[tuple[int, int]]:
    """(request, completion), in the order in which they got their first tokens."""
    found: dict[tuple[int, int], None] = {}
    for _, message in script.told:
        if isinstance(message, Drew):
            found |= dict.fromkeys((uid, i) for uid, i, *_ in zip(*message.columns, strict=True))
    return list(found)


def test_a_request_that_has_begun_ends_with_the_weights_with_which_it_began(weights: NewWeights, run: Path) -> None:
    newer = NewWeights.load(find_model(run), "cpu")  # with other weights
    large, late = Origin(0, 0), Origin(0, 1)
    job = _draw(list(range(3 * SLOTS)), length=12, ignore=True)  # three times what the batch has room for
    script = _run(weights, [(0, large, job), (2, Origin(0, -1), newer), (3, late, _draw([99], ignore=True))])
    versions: dict[int, set[str]] = {}
    for _, message in script.told:
        if isinstance(message, Drew):
            for uid in message.columns[0]:
                versions.setdefault(uid, set()).add(message.version)
    (before,), (after,) = versions[large.uid], versions[late.uid]
    assert before.startswith("export-") and after.startswith("last-")
    assert [m.version for _, m in script.told if isinstance(m, Followed)] == [after]
    assert _drawn(script)[large] == _drawn(_run(weights, [(0, large, job)]))[large]
    assert _drawn(script)[late] == _drawn(_run(newer, [(0, late, _draw([99], ignore=True))]))[late]


def test_what_cannot_be_drawn_fails_alone(weights: NewWeights) -> None:
    wrong = Origin(0, 1)
    script = _run(weights, [(0, Origin(0, 0), _draw([1], length=4)), (0, wrong, _draw([2], prompt=[10**6]))])
    failures = [(origin, message) for origin, message in script.told if isinstance(message, Failure)]
    assert [origin for origin, _ in failures] == [wrong] and "10" in failures[0][1].message
    assert Origin(0, 0) in _drawn(script)


def test_prompts_are_scored_between_steps(weights: NewWeights) -> None:
    script = _run(weights, [(0, Origin(0, 0), ScorePrompt([5, 6, 7], 2)), (0, Origin(0, 1), _draw([1]))])
    (answer,) = (message for _, message in script.told if isinstance(message, Answer))
    assert [token.token for token in answer.data] == [5, 6, 7] and answer.data[0].logprob is None
