"""Countdown: lines computed by hand, and the share of demonstrations that succeed."""

import random

from grpo_pl.data.tasks.countdown import CountdownPrompts
from grpo_pl.extras.live.command import LONG_SEARCH


def searched(numbers: list[int], target: int, **settings: int) -> list[tuple[str, str | None]]:
    source = CountdownPrompts(**settings)
    return [source.thought(line, target) for line in source.search(numbers)]


def test_a_search_by_hand() -> None:
    assert searched([12, 7, 3], 16) == [
        ("12+07=19,03:22><16==", "(12+07)-03"),
        ("12-07=05,03:08<>02<<15=<", None),
        ("12*07=..", None),  # 84
        ("12+03=15,07:22><08<>..", None),  # 105
        ("12-03=09,07:16==", "(12-03)+07"),
        ("12*03=36,07:43><29>>..", None),
        ("07+03=10,12:22><02<<..", None),
        ("07-03=04,12:16==", "(07-03)+12"),
        ("07*03=21,12:33><09<>..", None),
    ]
    of_a_difference_the_larger_value_first = ("07-03=04,12:16><08==", "12-(07-03)")
    assert searched([12, 7, 3], 8)[7] == of_a_difference_the_larger_value_first
    assert searched([12, 7, 3], 48)[7] == ("07-03=04,12:16<<08<=48==", "(07-03)*12")
    assert CountdownPrompts().search([12, 7, 3])[2].guesses == ["(12*07)+03", "(12*07)-03", "(12*07)*03"]


def test_numbers_have_as_many_digits_as_the_limit() -> None:
    assert searched([12, 7, 3], 90, limit=100)[2] == ("012*007=084,003:087=<>081=<>...", None)
    assert all(len(problem.question) == len("12 07 03:36") for problem in CountdownPrompts().validation())


def test_the_long_search_of_the_demo_has_one_solution() -> None:
    problem = CountdownPrompts().validation()[LONG_SEARCH]
    assert sorted(problem.columns["numbers"]) == [2, 3, 15] and problem.answer == "47"
    found = [answer for _, answer in searched(problem.columns["numbers"], 47) if answer]
    assert len(found) == 1 and found[0] in ("(15*03)+02", "(03*15)+02")


def test_demonstrations_succeed_as_often_as_stated() -> None:
    """0.25 by default, which docs/search.md names."""
    source, rng = CountdownPrompts(), random.Random(0)
    shown = [source.demonstration(p, rng) for step in range(1, 101) for p in source.prompts(-step, count=32)]
    assert 0.23 < sum("?" not in text for text in shown) / len(shown) < 0.27
    assert 1.2 < sum(text.count("\n") + 1 for text in shown) / len(shown) < 1.4  # lines; 3.1 where none gives up
