"""Puzzles solved by a written search: what is asked, what demonstrations show, and splits that share nothing."""

import random
import re
from collections.abc import Callable
from functools import cache

import pytest

from grpo_pl.data.tasks.countdown import CountdownPrompts
from grpo_pl.data.tasks.searches import SearchPrompts
from grpo_pl.data.tasks.subset_sum import SubsetSumPrompts
from grpo_pl.rewards import CountdownReward, Reward, SubsetSumReward
from grpo_pl.types import Problem

PUZZLES: list[tuple[Callable[..., SearchPrompts], Reward]] = [
    (CountdownPrompts, CountdownReward()),
    (SubsetSumPrompts, SubsetSumReward()),
]
pytestmark = pytest.mark.parametrize(("make", "reward"), PUZZLES, ids=["countdown", "subset_sum"])
Made = Callable[..., SearchPrompts]


@cache
def default(make: Made) -> SearchPrompts:
    """With its puzzles listed once."""
    return make()


def right(reward: Reward, prompts: list[Problem], completions: list[str]) -> list[bool]:
    columns = {"numbers": [prompt.columns["numbers"] for prompt in prompts]}
    return [score.value == 1.0 for score in reward(completions, [prompt.answer for prompt in prompts], columns)]


def training(source: SearchPrompts, steps: int = 20) -> list[Problem]:
    return [prompt for step in range(steps) for prompt in source.prompts(step, count=32)]


def test_a_search_that_never_gives_up_solves_every_problem(make: Made, reward: Reward) -> None:
    source, rng = make(give_up=0.0, unlucky=0.0), random.Random(0)
    prompts = [*training(source), *source.validation()]
    assert all(right(reward, prompts, [source.demonstration(prompt, rng) for prompt in prompts]))


def test_lines_have_letters_that_go_round(make: Made, reward: Reward) -> None:
    source, rng, begun = make(give_up=0.0, unlucky=0.0), random.Random(0), set[str]()
    for prompt in training(source, steps=5):
        letters = "abcdefghijklmnop"[: len(source.search(prompt.columns["numbers"]))]
        written = "".join(re.findall(r"(?:^<think>|\n)([a-z]) ", source.demonstration(prompt, rng)))
        assert written in letters * 2 and len(written) <= len(letters)
        begun.add(written[0])
    assert begun == set(letters)


def test_an_unlucky_search_shows_all_lines_between_two_that_hit(make: Made, reward: Reward) -> None:
    """Of those gaps the longest, going round; it gives up behind it."""
    source, longest = make(unlucky=1.0), 0
    for number, prompt in enumerate(training(source)):
        found = [source.thought(line, int(prompt.answer)) for line in source.search(prompt.columns["numbers"])]
        shown = source.demonstration(prompt, random.Random(number)).partition("</think>")[0].removeprefix("<think>")
        places = ["abcdefghij".index(line[0]) for line in shown.split("\n")]
        gaps = re.findall(r"\.+", "".join("." if answer is None else "!" for _, answer in found * 2))
        if not gaps:
            continue  # every line hits
        assert places == [(places[0] + turn) % len(found) for turn in range(max(map(len, gaps)))]
        assert [found[place][1] is None for place in places] == [True] * len(places)
        assert found[places[0] - 1][1] is not None and found[(places[-1] + 1) % len(found)][1] is not None
        assert shown.endswith("?")
        longest = max(longest, len(places))
    assert longest >= 8


def test_a_demonstration_is_right_where_it_says_so(make: Made, reward: Reward) -> None:
    source, rng = default(make), random.Random(0)
    prompts = training(source)
    shown = [source.demonstration(prompt, rng) for prompt in prompts]
    assert right(reward, prompts, shown) == ["?" not in text for text in shown]


def test_demonstrations_hold_no_held_out_problem(make: Made, reward: Reward) -> None:
    """Neither by its numbers nor by its target: what the cold start and the rollouts train on shares neither."""
    source = default(make)
    held_out, numbers, targets = source.validation(), set[str](), set[str]()
    for step in range(-120, 120):
        for prompt in source.prompts(step, count=32):
            numbers.add(str(sorted(prompt.columns["numbers"])))
            targets.add(prompt.answer)
    assert held_out
    assert not numbers & {str(sorted(prompt.columns["numbers"])) for prompt in held_out}
    assert not targets & {prompt.answer for prompt in held_out}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_training_targets_keep_every_digit_at_every_place(make: Made, reward: Reward, seed: int) -> None:
    source = make(seed=seed)
    puzzles = source.prompts(0, count=7000)
    kept, held_out = {int(p.answer) for p in puzzles}, {int(p.answer) for p in source.validation()}
    for place in (0, 1):
        assert {divmod(target, 10)[place] for target in held_out} <= {divmod(target, 10)[place] for target in kept}
    assert len(source.validation()) >= (150 if isinstance(source, CountdownPrompts) else 100)  # val_prompts in configs
    last = [target % 10 for target in held_out if target < 60]
    assert len(last) == len(set(last))  # of six tens one each: no last digit is held out twice


def test_no_problem_comes_twice_in_a_pass(make: Made, reward: Reward) -> None:
    source = default(make)
    prompts = training(source, steps=120)
    assert len({(*sorted(prompt.columns["numbers"]), prompt.answer) for prompt in prompts}) == len(prompts) == 120 * 32
    assert source.prompts(3, count=32) == make().prompts(3, count=32) != source.prompts(3, 1, count=32)
    assert source.prompts(3, count=32) != make(seed=1).prompts(3, count=32)


def test_the_order_of_the_numbers_changes_from_pass_to_pass(make: Made, reward: Reward) -> None:
    source, seen, ids = default(make), dict[tuple[int, ...], set[str]](), set[int]()
    for step in range(4):  # each a pass: more than half of all problems
        for prompt in source.prompts(step, count=5000):
            seen.setdefault((*sorted(prompt.columns["numbers"]), int(prompt.answer)), set()).add(prompt.question)
            ids.add(prompt.id)
    assert sum(map(len, seen.values())) > 2 * len(seen) == 2 * len(ids)  # the puzzle stays the same
    assert source.validation() == make().validation()


def test_every_line_has_what_it_says(make: Made, reward: Reward) -> None:
    """Each value is that of its answer, and the signs behind it compare its digits with those of the target."""
    source = default(make)
    for prompt in training(source, steps=3):
        target, reached = int(prompt.answer), set[str]()
        for line in source.search(prompt.columns["numbers"]):
            text, answer = source.thought(line, target)
            assert all(eval(_plain(step.answer)) == step.value for step in line.steps if step.answer is not None)
            pair, value = text.split("=")[0], text.split("=")[1][:2]
            assert eval(_plain(pair)) == int(value) if value != ".." else eval(_plain(pair)) > source.largest_target
            compared = re.findall(r"(\d)(\d)([<>=])([<>=])", text)
            for tens, ones, *signs in compared:
                for digit, other, sign in zip((tens, ones), divmod(target, 10), signs, strict=True):
                    assert {"<": int(digit) < other, "=": int(digit) == other, ">": int(digit) > other}[sign]
            values = [
                step.value for step in line.steps if step.answer is not None and step.value <= source.largest_target
            ]
            if answer is not None:
                values = values[: values.index(target) + 1]
                assert text.endswith("==")
            assert [int(tens + ones) for tens, ones, *_ in compared] == values
            reached |= {answer} - {None}
        assert reached and all(eval(_plain(answer)) == target for answer in reached)


def _plain(expression: str) -> str:
    return re.sub(r"\b0(?=\d)", "", expression)


def test_more_problems_than_there_are_is_one_clear_error(make: Made, reward: Reward) -> None:
    with pytest.raises(ValueError, match="99999 held-out problems were asked for"):
        default(make).validation(99_999)
    with pytest.raises(ValueError, match="99999 training problems were asked for"):
        default(make).prompts(0, count=99_999)
