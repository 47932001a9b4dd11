"""Puzzles solved by a written search: what is asked, what demonstrations show, and splits that share nothing."""

import random
import re
from collections.abc import Callable

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


def test_an_unlucky_search_gives_up_before_the_line_that_hits(make: Made, reward: Reward) -> None:
    unlucky, lucky = make(unlucky=1.0), make(give_up=0.0, unlucky=0.0)
    prompts, longest = training(unlucky), 0
    for number, prompt in enumerate(prompts):
        found = lucky.demonstration(prompt, random.Random(number)).partition("</think>")[0].split("\n")
        written = unlucky.demonstration(prompt, random.Random(number)).partition("</think>")[0].split("\n")
        if len(found) == 1:
            assert written == found  # the first line hits
        else:
            assert written == [*found[:-2], f"{found[-2]}?"]
        longest = max(longest, len(written))
    assert longest >= 8


def test_a_demonstration_is_right_where_it_says_so(make: Made, reward: Reward) -> None:
    source, rng = make(), random.Random(0)
    prompts = training(source)
    shown = [source.demonstration(prompt, rng) for prompt in prompts]
    assert right(reward, prompts, shown) == ["!" in text for text in shown]


def test_demonstrations_hold_no_held_out_problem(make: Made, reward: Reward) -> None:
    """Neither by its numbers nor by its target: what the cold start and the rollouts train on shares neither."""
    source = make()
    held_out, numbers, targets = source.validation(), set[str](), set[str]()
    for step in [*range(-400, 0), *range(120)]:
        for prompt in source.prompts(step, count=32):
            numbers.add(str(sorted(prompt.columns["numbers"])))
            targets.add(prompt.answer)
    assert len(held_out) >= 150
    assert not numbers & {str(sorted(prompt.columns["numbers"])) for prompt in held_out}
    assert not targets & {prompt.answer for prompt in held_out}


def test_no_problem_comes_twice_in_a_pass(make: Made, reward: Reward) -> None:
    source = make()
    prompts = training(source, steps=120)
    assert len({(*sorted(prompt.columns["numbers"]), prompt.answer) for prompt in prompts}) == len(prompts) == 120 * 32
    assert source.prompts(3, count=32) == make().prompts(3, count=32) != source.prompts(3, 1, count=32)
    assert source.prompts(3, count=32) != make(seed=1).prompts(3, count=32)


def test_the_order_of_the_numbers_changes_from_pass_to_pass(make: Made, reward: Reward) -> None:
    source, seen = make(), dict[tuple[int, ...], set[str]]()
    for step in range(4):  # each a pass: more than half of all problems
        for prompt in source.prompts(step, count=5000):
            seen.setdefault((*sorted(prompt.columns["numbers"]), int(prompt.answer)), set()).add(prompt.question)
    assert sum(map(len, seen.values())) > 2 * len(seen)
    assert source.validation() == make().validation()


def test_every_line_has_what_it_says(make: Made, reward: Reward) -> None:
    """Each value is that of its answer, and the sign behind it says on which side of the target it lies."""
    source = make()
    for prompt in training(source, steps=3):
        target, reached = int(prompt.answer), set[str]()
        for line in source.search(prompt.columns["numbers"]):
            text, answer = source.thought(line, target)
            values = [step.value for step in line.steps if step.answer is not None]
            assert values == [eval(_plain(step.answer)) for step in line.steps if step.answer is not None]
            pair, value = text.split("=")[0], re.split(r"[,<>!]", text.split("=")[1])[0]
            assert eval(_plain(pair)) == int(value) if value != ".." else eval(_plain(pair)) > source.largest_target
            signs = "".join("!" if value == target else "<>"[value > target] for value in values)
            assert re.sub(r"[^<>!]", "", text) == signs.partition("!")[0] + "!" * ("!" in signs)
            reached |= {answer} - {None}
        assert reached and all(eval(_plain(answer)) == target for answer in reached)


def _plain(expression: str) -> str:
    return re.sub(r"\b0(?=\d)", "", expression)


@pytest.mark.parametrize("name", ["give_up", "unlucky", "size", "largest"])
def test_settings_out_of_range_are_refused(make: Made, reward: Reward, name: str) -> None:
    if name in make.__dataclass_fields__:  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=f"{name} must lie .*got -1"):
            make(**{name: -1})


def test_more_problems_than_there_are_is_one_clear_error(make: Made, reward: Reward) -> None:
    with pytest.raises(ValueError, match="99999 held-out problems were asked for"):
        make().validation(99_999)
    with pytest.raises(ValueError, match="99999 training problems were asked for"):
        make().prompts(0, count=99_999)
