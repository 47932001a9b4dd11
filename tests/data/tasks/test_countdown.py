"""Countdown: lines computed by hand, and the share of demonstrations that succeed."""

import random

from grpo_pl.data.tasks.countdown import CountdownPrompts


def test_a_search_by_hand() -> None:
    lines = CountdownPrompts().search([12, 7, 3])
    assert [line.text for line in lines] == [
        "12+7=19,19+3=22,19-3=16,19*3=57",
        "12-7=5,5+3=8,5-3=2,5*3=15",
        "12*7=.",  # 84
        "12+3=15,15+7=22,15-7=8,15*7=.",  # 105
        "12-3=9,9+7=16,9-7=2,9*7=.",  # 63
        "12*3=36,36+7=43,36-7=29,36*7=.",
        "7+3=10,10+12=22,12-10=2,10*12=.",
        "7-3=4,4+12=16,12-4=8,4*12=48",
        "7*3=21,21+12=33,21-12=9,21*12=.",
    ]
    assert lines[7].hits == {
        16: ("7-3=4,4+12=16", "(7-3)+12"),
        8: ("7-3=4,4+12=16,12-4=8", "12-(7-3)"),
        48: ("7-3=4,4+12=16,12-4=8,4*12=48", "(7-3)*12"),
    }
    assert lines[2].guesses == ("(12*7)+3", "(12*7)-3", "(12*7)*3")


def test_equal_numbers_make_fewer_lines() -> None:
    assert [line.text for line in CountdownPrompts().search([7, 7, 3])] == [
        "7+7=14,14+3=17,14-3=11,14*3=42",
        "7-7=0,0+3=3,3-0=3,0*3=0",
        "7*7=49,49+3=52,49-3=46,49*3=.",
        "7+3=10,10+7=17,10-7=3,10*7=.",
        "7-3=4,4+7=11,7-4=3,4*7=28",
        "7*3=21,21+7=28,21-7=14,21*7=.",
    ]
    assert len(CountdownPrompts().search([5, 5, 5])) == 3


def test_demonstrations_succeed_as_often_as_stated() -> None:
    """0.35 by default, which the description of the configuration names."""
    source, rng = CountdownPrompts(), random.Random(0)
    shown = [source.demonstration(p, rng) for step in range(1, 101) for p in source.prompts(-step, count=32)]
    assert 0.33 < sum("!" in text for text in shown) / len(shown) < 0.37
    assert 1.2 < sum(text.count("\n") + 1 for text in shown) / len(shown) < 1.4  # lines; 3.1 where none gives up
