"""How tests are read, what of them a program is given, and what is compared with what."""

import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from grpo_pl.extras.code.suites import BadTests, Outcome, Suite, read_suite
from grpo_pl.extras.code.values import MOST_KEYS, Unreadable, read_result, same_output, same_value


def judged(suite: Suite, *values: Any) -> list[str]:
    """The faults of the one run of a suite whose program gave back ``values``."""
    (run,) = suite
    return run.judge(Outcome("ended", 0, "", "", [json.dumps({"value": value}) for value in values]))


def given(suite: Suite) -> str:
    """All that goes to the process of a program."""
    return json.dumps([(run.input, run.steps) for run in suite])


def test_inputs_and_outputs_of_apps() -> None:
    suite = read_suite(json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["314\n", ["7", "8"]]}))
    assert [run.input for run in suite] == ["1 2\n", "3\n4"]
    assert suite[0].judge(Outcome("ended", 0, " 314 \n\n", "", [])) == [""]
    assert suite[0].judge(Outcome("ended", 1, "314", "ValueError: no\n", [])) == ["ValueError: no"]
    assert suite[0].judge(Outcome("cpu", -9, "314", "", [])) == ["over its CPU time"]
    assert suite[1].judge(Outcome("ended", 0, "7\n8", "", [])) == [""]
    assert suite[1].judge(Outcome("ended", 0, "7", "", [])) == ["printed '7'"]


def test_calls_of_apps_whose_outputs_are_all_in_a_list_of_one() -> None:
    suite = read_suite(json.dumps({"fn_name": "f", "inputs": [[1, "a"], [2, "b"]], "outputs": [[[1]], [[2, 3]]]}))
    assert suite[0].steps == ({"call": "f", "arguments": [1, "a"]}, {"call": "f", "arguments": [2, "b"]})
    assert judged(suite, [1], [2, 3]) == judged(suite, [[1]], [[2, 3]]) == ["", ""]
    assert judged(suite, [1], [2, 4]) == ["", "gave [2, 4]"]


def test_an_output_that_is_a_list_of_several_is_not_taken_for_its_first_member() -> None:
    suite = read_suite(json.dumps({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[[1], [2]], [[3]]]}))
    assert judged(suite, [1], [[3]]) == ["gave [1]", ""]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"fn_name": "f", "inputs": ['[1, 2]\n"a"'], "outputs": ["[3, 4]"]}),
        json.dumps([{"input": '[1, 2]\n"a"', "output": "[3, 4]", "testtype": "functional", "fn_name": "f"}]),
    ],
)
def test_calls_of_livecodebench_have_an_argument_a_line(text: str) -> None:
    suite = read_suite(text)
    assert suite[0].steps == ({"call": "f", "arguments": [[1, 2], "a"]},)
    assert judged(suite, [3, 4]) == judged(suite, {"tuple": [3, 4]}) == [""]


def test_assertions_tell_the_program_the_question_alone() -> None:
    suite = read_suite(json.dumps(["assert f(2, 'a') == 314159", "assert abs(g(1.5) - 2718) < 1e-3, 'near 2718'"]))
    assert suite[0].steps == ({"eval": "f(2, 'a')"}, {"eval": "g(1.5)"})
    assert "314159" not in given(suite) and "2718" not in given(suite)
    assert judged(suite, 314159, 2718.0000001) == ["", ""]
    assert judged(suite, 314158, 2719) == ["gave 314158", "gave 2719"]


def test_check_of_humaneval_is_taken_apart() -> None:
    body = "    assert candidate([3]) == [31337]\n    assert not candidate(0)\n"
    text = f"METADATA = {{'a': 1}}\n\ndef check(candidate):\n{body}\ncheck(solve)\n"
    suite = read_suite(text)
    assert [list(step) for step in suite[0].steps or ()] == [["exec"], ["exec"], ["eval"], ["eval"]]
    assert (suite[0].steps or ())[1] == {"exec": "candidate = solve"}
    assert "31337" not in given(suite)
    assert judged(suite, [31337], []) == ["", ""]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("xs = [3, 1]\nsort(xs)\nassert xs == [31337]", ["(sort(xs), None)[1]", "xs"]),
        ("xs = [3, 1]\nassert sort(xs) is None\nassert xs == [31337] and len(xs) == 2", ["sort(xs)", "xs", "len(xs)"]),
        ("d = {}\nSolution().fill(d, n=3)\nassert sorted(d)[0] == 31337",
         ["(Solution().fill(d, n=3), None)[1]", "sorted(d)[0]"]),
        ("a, b = split([1])\nassert a == 31337 != b", ["a", "b"]),
        ("s = Stack()\ns.push(3)\nassert s.items == [31337]", ["(s.push(3), None)[1]", "s.items"]),
        ("def check(candidate):\n    xs = [1]\n    candidate(xs)\n    assert xs == [31337]\ncheck(sort)",
         ["(candidate(xs), None)[1]", "xs"]),
        ("xs = ys = [1]\nsort(xs)\nzs = xs\nassert zs[1:] == [31337]", ["(sort(xs), None)[1]", "zs[1:]"]),
    ],
)  # fmt: skip
def test_variables_that_a_call_made_or_changed_are_asked_of_the_program(text: str, asked: list[str]) -> None:
    (run,) = read_suite(text)
    assert [step["eval"] for step in run.steps or () if "eval" in step] == asked
    assert "31337" not in given((run,))


@pytest.mark.parametrize(
    "text",
    [
        "expected = [31337]\nassert f(1) == expected", "expected = [31337]\nxs = [1]\nsort(xs)\nassert xs == expected",
        "ok = f(1) == 31337\nassert ok", "got, expected = f(1), 31337\nassert got == expected",
        "def g(x): return 31337\nexpected = g(1)\nassert f(1) == expected",
        "from copy import copy\nexpected = copy([31337])\nassert f(1) == expected",
        "xs = [1]\nsort(xs)\nxs = [31337]\nassert f(1) == xs",
        "ys = [31337]\nall = []\nall.append(ys)\nassert f(1) == ys",
        "ys = [31337]\nf(ys[0])\nassert f(1) == ys", "ys = [31337]\nprint(ys)\nassert f(1) == ys",
    ],
)  # fmt: skip
def test_variables_of_the_tests_themselves_are_never_asked_of_the_program(text: str) -> None:
    with pytest.raises(BadTests, match="no call"):
        read_suite(text)


@pytest.mark.parametrize(
    ("assertion", "values", "holds"),
    [
        ("f(1) == g(1)", [5, 5], True), ("f(1) == g(1)", [5, 6], False),
        ("set(f(1)) == {1, 2}", [{"set": [2, 1]}], True), ("set(f(1) + g(1)) == {1, 2}", [[2], [1, 2]], True),
        ("sorted(f(1) + g(1)) == [1, 2]", [{"tuple": [2]}, {"tuple": [1]}], True),
        ("f(1) == (1, 2)", [{"tuple": [1, 2]}], True), ("f(1) == (1, 2)", [[1, 2]], False),
        ("f(1) is None", [None], True), ("f(1) is True", [1], False), ("f(1)[1]['a'] == 3", [3], True),
        ("(f(1) + g(1))[1]['a'] == 3", [[0], [{"dict": [["a", 3]]}]], True),
        ("f(1) == {1: 'a', (2, 3): None}", [{"dict": [[1, "a"], [{"tuple": [2, 3]}, None]]}], True),
        ("math.isclose(f(1), 0.3, rel_tol=0.01)", [0.301], True), ("len(f(1)) > 2 and 'b' in f(1)", [3, "abc"], True),
        ("(f(1) or 5) == 5 and (f(1) or []) == []", [0, 0], True),
        ("(g(1) and f(1)) == 'a' and f(1) < 'b' and not (f(1) < '0' < 5)", [1, "a", "a", "a"], True),
        ("f(1) == 2 ** 20 - 1", [1048575], True), ("f(1) == 'ab' * 3", ["ababab"], True),
        ("f(1) < 3", ["text"], False),  # what raises is not passed
        ("f(1) == 5", [{"other": ["Sneaky"]}], False), ("f(1) == b'\\x01'", [{"bytes": "01"}], True),
        ("f(1) * 10 == 50", [5], True),
        ("'a' * f(1) == 'a'", [10**9], False),  # would fill the memory of this process
        ("f(1) ** 2 == 4", [10**600], False), ("set(f(1) + g(1)) == {1}", [list(range(MOST_KEYS + 1)), []], False),
        ("f(1) == 5", [{"range": [0, 10**12, 1]}], False),  # each of these would take for ever to look through
        ("1.5 in f(1)", [{"range": [0, 10**12, 1]}], False),
        ("int(f(1) + 1) == 5", [{"decimal": "1e999999999"}], False),
        ("Fraction(f(1) + g(1)) == 5", ["1e9999", "99999"], False), ("len(range(f(1))) == 5", [10**12], False),
        ("round(f(1), g(1)) == 5", [7, -(10**12)], False), ("f(1) == 5", [{"decimal": "sNaN"}], False),
        ("f(1) < 5", [{"decimal": "NaN"}], False),
        ("isclose(f(1), 0.3)", [{"fraction": [3, 10]}], True),  # evaluated here, not by an isclose of the program
    ],
)  # fmt: skip
def test_what_an_assertion_expects_is_evaluated_here(assertion: str, values: list[Any], holds: bool) -> None:
    (fault,) = judged(read_suite(f"assert {assertion}"), *values)
    assert (fault == "") == holds, fault


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no assertion"), ("5", "neither an object"), ("{}", "as many outputs as inputs"),
        ('{"inputs": ["1"], "outputs": []}', "as many outputs as inputs"),
        ('{"inputs": [1], "outputs": ["1"]}', "must be texts, got 1"),
        ('{"inputs": [[1]], "outputs": [1], "fn_name": "a.b"}', "the name of a function, got 'a.b'"),
        ('{"inputs": ["x y"], "outputs": ["1"], "fn_name": "f"}', "'x y' is no JSON"),
        ('[{"input": "1", "output": 2}]', "both texts"),
        ('[{"input": "1", "output": "2", "testtype": "functional"}]', "need fn_name"),
        ('[{"input": "1", "output": "2", "testtype": []}]', "testtype must be stdin"),
        ('[{"input": "1", "output": "2", "testtype": "functional", "fn_name": {}}]', "the name of a function"),
        ("assert f(1) == expected", "'expected' is no call"),
        ("assert all(f(x) == y for x, y in [(1, 2)])", "is no call, literal"),
        ("assert isinstance(f(1), int)", "would let the program judge itself"),
        ("assert sorted(f(1), key=lambda x: x == 5)", "would let the program|is no call, literal"),
        ("assert check(f(1) == 2)", "compares inside"), ("assert 1 == 1", "asks the program for nothing"),
        ("for i in range(3):\n    assert f(i) == i", "they must stand alone"), ("assert f(1) ==", "SyntaxError"),
        ("\x00", "null"), ("[" * 100_000, "neither an object|nested|Memory|Recursion"),
    ],
)  # fmt: skip
def test_tests_that_cannot_be_run_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(BadTests, match=complaint):
        read_suite(text)


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ([1, (2, 3)], [1, [2, 3]], True), ({1: "a"}, {"1": "a"}, True), (0.1 + 0.2, 0.3, True), (3, 3.0, True),
        (10**400, 1.0, False), (float("nan"), float("nan"), False), ([1, 2], [1], False), ("1", 1, False),
        ({1, 2}, [1, 2], False), (Fraction(1, 2), 0.5, True), (Decimal("0.1"), 0.1, True), (Decimal("3"), 3, True),
        (Decimal("sNaN"), 3, False), (Decimal("NaN"), 3.0, False), (range(2), [0, 1], False), (1 + 0j, 1, True),
        (None, False, False),
    ],
)  # fmt: skip
def test_values_are_compared_as_json_writes_them(found: Any, expected: Any, same: bool) -> None:
    assert same_value(found, expected) == same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n3\n", "1 2 \n3", True), ("1\n\n2", "1\n2", False), ("1.0", "1", True), ("0.3000000001", "0.3", True),
        ("50000000000000001", "50000000000000000", False),  # integers have no tolerance
        ("YES", "yes", False), ("1 2", "1\n2", False), ("nan", "nan", True), ("nan", "0.5", False),
        ("sNaN", "1", False),  # raises where it is compared as a decimal
        ("-sNaN123", "0.5", False),
        ("1_000", "1000", False),  # Python reads these as numbers, and nobody else does
        ("1__0.5", "10.5", False), ("\u0661", "1", False), ("\uff11", "1", False), ("1e999999999", "1", False),
        ("1e-999999999", "0.0", False),
        ("1e400", "1e500", False),  # both are infinite as floats
        ("1e400", "1e+400", True), ("1E3", "1000", True), ("+7.", "7", True), (".5", "0.50", True),
        ("0x10", "16", False), ("9" * 5000, "8" * 5000, False), ("", "", True),
    ],
)  # fmt: skip
def test_printed_lines_are_compared_word_by_word(found: str, expected: str, same: bool) -> None:
    assert same_output(found, expected) == same


@pytest.mark.parametrize(
    "line",
    ["", "true", '{"value": 1, "error": ""}', "[" * 100_000, "9" * 5000, '{"value": {"set": [[1]]}}',
     '{"value": {"x": 1}}', '{"value": {"range": [0, 5, 0]}}', '{"value": {"range": [0, 1000000000000, 1]}}',
     '{"value": {"decimal": "sNaN"}}', '{"value": {"decimal": "1e999999999"}}', '{"value": {"fraction": [1, 0]}}',
     '{"value": {"fraction": ["1e999999999", 1]}}', '{"value": {"date": "x"}}',
     '{"value": {"set": [{"other": ["A"]}]}}',
     '{"value": {"complex": [[], 1]}}', '{"value": {"timedelta": [1e999]}}', '{"value": {"deque": 5}}',
     '{"value": {"bytes": "zz"}}', '{"value": {}}',
     json.dumps({"value": {"set": list(range(MOST_KEYS + 1))}})],
)  # fmt: skip
def test_lines_that_no_value_has_are_refused(line: str) -> None:
    with pytest.raises(Unreadable):
        read_result(line)
