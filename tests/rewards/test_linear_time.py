"""What reads a text takes time in proportion to its length, whatever the text repeats."""

import ast
import gc
import importlib
import inspect
import pkgutil
import re
import re._constants as kinds
import re._parser as parser
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import regex

import grpo_pl.rewards
from grpo_pl.rewards import FormatReward, LenientAnswerReward, StrictAnswerReward
from grpo_pl.rewards.completion_text import is_blank, last_boxed, stated_answer
from grpo_pl.rewards.mathematics.boxes import boxed_answer
from grpo_pl.rewards.mathematics.second_opinion import boxed_answers

LENGTHS = (125, 1_000, 8_000, 64_000)
"""Characters; each text is eight times as long as the one before."""
NOTHING_S = 0.002
"""Seconds that are not told apart from none at all."""


TOO_FAST = 32.0
"""Growth that is neither linear (8) nor an accident; a quadratic rule has 64."""


def growth(work: Callable[[str], object], text: Callable[[int], str], lengths: Sequence[int] = LENGTHS) -> float:
    """The factor by which the CPU time of ``work`` grows from one length to the next, the largest of all; longer texts
    are left out where a shorter one took too long. Of three attempts the best counts: others use the machine, too."""

    def seconds(length: int) -> float:
        written = text(length)
        gc.disable()  # a collection walks over all that the tests have loaded
        started = time.process_time()
        work(written)
        took = time.process_time() - started
        gc.enable()
        return max(took, NOTHING_S)

    factors = [1.0]
    for shorter, longer in pairwise(lengths):
        factors.append(seconds(longer) / seconds(shorter))
        for _ in range(2):
            if factors[-1] > TOO_FAST:
                factors[-1] = min(factors[-1], seconds(longer) / seconds(shorter))
        if factors[-1] > TOO_FAST:
            break
    return max(factors)


@pytest.mark.parametrize("opening", ["{", r"\boxed{ ", r"\boxed{x ", "<answer>\\boxed{"])
@pytest.mark.parametrize("closing", ["", " }", "}}"])
def test_nested_boxes_are_read_in_linear_time(opening: str, closing: str) -> None:
    def nested(length: int) -> str:
        depth = length // (len(opening) + len(closing))
        return f"\\boxed{{1}} {opening * depth}5{closing * depth}"

    strict, lenient, form = StrictAnswerReward(), LenientAnswerReward(), FormatReward()
    for read in (
        last_boxed, boxed_answer, boxed_answers, stated_answer, is_blank,
        lambda text: strict.score(text, "5"), lambda text: lenient.score(text, "5"), lambda text: form.score(text, "5"),
    ):  # fmt: skip
        assert growth(read, nested) < TOO_FAST


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\boxed{ \boxed{5} } }", "5"), (r"\boxed{\boxed{5} }, \boxed{6", None),
        (r"\boxed{ \boxed{5}x }", r" \boxed{5}x "), (r"\boxed{\boxed{1}\boxed{2}}", r"\boxed{1}\boxed{2}"),
        (r"\boxed{ \boxed{5 }", "5 "), (r"\boxed{1}\boxed{}", ""), (r"\boxed{\{\boxed{5}\}}", r"\{\boxed{5}\}"),
    ],
)  # fmt: skip
def test_of_nested_boxes_the_outermost_with_anything_beside_another_counts(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize("gold", ["x+1", "5"])
@pytest.mark.parametrize(
    "repeated",
    [
        r"\langle1,", r"\langle 1 , ", "⟨1,", r"\abs{1", r"\textbf{", r"\boldsymbol{x", r"{1 \over ", "|", "||a", "]1,",
        r"\color[a", "((", r"\left(", "a_1^", r"\text{ ", ", or ", r"1\,", "1.", "√(", "\u0301\u0316",
    ],
)  # fmt: skip
def test_the_lenient_rule_reads_any_text_in_linear_time(repeated: str, gold: str) -> None:
    def text(length: int) -> str:
        return (repeated * length)[:length]

    judge = LenientAnswerReward()
    assert growth(lambda written: judge.score(written, gold), text) < TOO_FAST


def test_the_lenient_rule_finds_an_answer_wherever_it_stands_in_a_long_text() -> None:
    judge, word = LenientAnswerReward(), "so "
    spellings = (r"\langle 1, \pi \rangle", r"\left( 1,\, \pi \right)")
    for before in (0, 21, *range(450, 520, 9), 1_000, 20_000):
        for written in spellings:
            completion = word * (before // 3) + written + " " + word * 700
            assert judge.score(completion, r"(1,\pi)").value == 1, (before, written)
            assert judge.score(completion, r"(2,\pi)").value == 0
    long = "x+1, " * 300
    assert judge.score(f"{word * 900}{long}{word * 900}", long.replace(" ", "")).value == 1
    assert judge.score(word * 900, long).value == 0


# --- every regular expression ---

WHOLE_TEXTS = ("mathematics.boxes", "mathematics.second_opinion")
ANSWERS = ("mathematics.", "sandbox.math_judge", "sandbox.task_queue")
"""Modules that read answers, in which `canonical` leaves one white space where there were several; those of
``WHOLE_TEXTS`` read completions as they are."""
METHODS = {"match", "search", "fullmatch", "findall", "finditer", "sub", "subn", "split"}
STAND_INS = {"name": "x", "letter": "x", "longest": 16}
"""Values of what literals in the source refer to and only a call knows."""


def modules() -> Iterator[tuple[str, ModuleType, ast.AST]]:
    for found in pkgutil.walk_packages(grpo_pl.rewards.__path__, "grpo_pl.rewards."):
        module = importlib.import_module(found.name)
        yield found.name.removeprefix("grpo_pl.rewards."), module, ast.parse(inspect.getsource(module))


def patterns_in(value: Any) -> Iterator[re.Pattern[str]]:
    if isinstance(value, re.Pattern | regex.Pattern):
        yield value
    elif isinstance(value, dict | list | tuple | set | frozenset):
        for item in value.values() if isinstance(value, dict) else value:
            yield from patterns_in(item)


def every_pattern() -> dict[tuple[str, re.Pattern[str]], set[str]]:
    """(module, pattern) -> the methods that are called, or handed on, of a module's attributes, of what lists of them
    hold, and of literals in the source."""
    found: dict[tuple[str, re.Pattern[str]], set[str]] = defaultdict(set)
    elsewhere: dict[int, set[str]] = defaultdict(set)
    for name, module, tree in modules():
        calls, of_others = defaultdict(set), set[str]()
        called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for attribute in ast.walk(tree):
            if not (isinstance(attribute, ast.Attribute) and attribute.attr in METHODS):
                continue
            of, method = attribute.value, attribute.attr
            of = of.value if isinstance(of, ast.Subscript) else of
            said, node = ast.unparse(of), called.get(id(attribute))
            if said in ("re", "regex") and node is not None:
                try:
                    literal = eval(ast.unparse(node.args[0]), vars(module), STAND_INS)
                except (NameError, AttributeError):
                    continue  # of a caller, who is a user
                for pattern in (
                    patterns_in(literal) if not isinstance(literal, str) else [vars(module)[said].compile(literal)]
                ):
                    found[name, pattern].add(method)
            elif said.split(".")[0] in vars(module):
                calls[said].add(method)
                if re.fullmatch(r"[\w.]+", said):  # of another module, too
                    elsewhere[id(eval(said, vars(module)))].add(method)
            elif method != "split":  # which texts have, too
                of_others.add(method)
        for attribute, value in vars(module).items():
            direct = isinstance(value, re.Pattern | regex.Pattern)
            for pattern in patterns_in(value):
                found[name, pattern] |= calls[attribute] or (set() if direct else of_others)
    for (_, pattern), methods in found.items():
        methods |= elsewhere[id(pattern)]
    return {key: methods for key, methods in found.items() if methods}


def pieces(tree: Any, choice: int) -> list[str]:
    """A text that a pattern matches, or nearly, in pieces: its literals, and a character of each of its classes."""
    found: list[str] = []
    literal = ""
    for kind, value in tree:
        if kind is kinds.LITERAL:
            literal += chr(value)
            continue
        found, literal = [*found, literal] if literal else found, ""
        if kind is kinds.ANY or kind is kinds.NOT_LITERAL:
            found.append("a")
        elif kind is kinds.IN:
            found.append(member(value, choice))
        elif kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT):
            inner = pieces(value[2], choice)
            found += [inner[0] * max(1, min(value[0], 20))] if len(inner) == 1 else inner
        elif kind is kinds.SUBPATTERN:
            found += pieces(value[3], choice)
        elif kind is kinds.ATOMIC_GROUP:
            found += pieces(value, choice)
        elif kind is kinds.BRANCH:
            found += pieces(value[1][choice % len(value[1])], choice)
        elif kind is kinds.ASSERT and value[0] == 1:
            found += pieces(value[1], choice)
    return [*found, literal] if literal else found


def member(items: list[tuple[Any, Any]], choice: int) -> str:
    """A character of a class."""
    of_category = {kinds.CATEGORY_DIGIT: "1", kinds.CATEGORY_SPACE: " ", kinds.CATEGORY_NOT_WORD: "-"}
    if items[0][0] is kinds.NEGATE:
        refused = {chr(value) for kind, value in items if kind is kinds.LITERAL}
        return next(char for char in ("1a, \\é"[choice % 4 :] + "a1é€") if char not in refused)
    kind, value = items[choice % len(items)]
    return of_category.get(value, "a") if kind is kinds.CATEGORY else chr(value[0] if kind is kinds.RANGE else value)


def attacks(pattern: re.Pattern[str], choices: int) -> set[tuple[str, str]]:
    """(start of a text, what it repeats from there on): the pieces of a match, and what stands between two of them."""
    found = set()
    for choice in range(choices):
        parts = pieces(parser.parse(pattern.pattern, pattern.flags & (re.I | re.M | re.S | re.X)), choice)[:14]
        for start in range(len(parts)):
            for end in range(start + 1, len(parts) + 1):
                repeated = "".join(parts[start:end])
                if choices > 1 or end == start + 1 or start == 0:
                    found |= {("", repeated), ("".join(parts[:start]), repeated)}
    return found


def slow_patterns(choices: int, lengths: Sequence[int]) -> list[tuple[str, str, str, str, str]]:
    slow = []
    for (module, pattern), methods in every_pattern().items():
        answers = module.startswith(ANSWERS) and module not in WHOLE_TEXTS
        ways = {"fullmatch" if method in ("match", "fullmatch") else "findall" for method in methods}
        for start, repeated in attacks(pattern, choices):

            def text(length: int, start: str = start, repeated: str = repeated, answers: bool = answers) -> str:
                written = start + (repeated * length)[:length] + "\0"
                return re.sub(r"\s+", " ", written) if answers else written

            for way in ways:
                if growth(getattr(pattern, way), text, lengths) > TOO_FAST:
                    slow.append((module, pattern.pattern, way, start, repeated))
                    break
            if slow and slow[-1][1] == pattern.pattern:
                break
    return slow


@pytest.mark.slow
def test_every_regular_expression_of_the_rewards_is_linear_on_its_own_literals() -> None:
    assert slow_patterns(1, LENGTHS[:3]) == []


@pytest.mark.slow
def test_every_regular_expression_is_linear_on_all_that_its_parts_can_repeat() -> None:
    assert slow_patterns(6, LENGTHS) == []


def test_regular_expressions_are_found_wherever_the_source_has_them() -> None:
    found = {(module, pattern.pattern) for module, pattern in every_pattern()}
    assert ("completion_text", r"\\boxed\s*\{") in found
    assert ("mathematics.canonical", r"\{,\}") in found  # in a list
    assert ("answer_reading", r"-?\d+(?:\.\d+)?") in found  # a literal in a function
    in_modules = {(name, pattern) for name, module, _ in modules() for pattern in patterns_in(vars(module))}
    unused = {(name, pattern.pattern) for name, pattern in in_modules if name.startswith("mathematics")} - found
    assert unused == set()
    assert len(found) > 250


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"x+\s+$", r"\d+(?:\.\d+)?%", r"\(.*,.*\)=", "a[^b]*,[^b]*b"])
def test_a_quadratic_expression_is_found_by_its_own_literals(pattern: str) -> None:
    slow = re.compile(pattern)
    assert max(growth(slow.findall, lambda n, a=a, b=b: a + b * n, LENGTHS[:3]) for a, b in attacks(slow, 1)) > TOO_FAST
