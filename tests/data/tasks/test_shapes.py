"""Questions about drawn shapes: answers read off the pixels again, splits, and pictures that are permuted."""

import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial

import numpy as np
import pytest

from grpo_pl.config.objects import build
from grpo_pl.data.cells import image_digests
from grpo_pl.data.sources import PromptSource
from grpo_pl.data.tasks.shapes import COLORS, PLACES, SHAPES, ShapePrompts
from grpo_pl.extras.images.picture import Picture
from grpo_pl.rewards import FunctionReward, MathReward
from grpo_pl.types import Problem

Seen = dict[str, tuple[str, str]]


@cache
def training(seed: int = 0, count: int = 600) -> list[Problem]:
    return ShapePrompts(seed=seed).prompts(0, count=count)


@cache
def held_out(kind: str, seed: int = 0) -> list[Problem]:
    return ShapePrompts(held_out=kind, seed=seed).validation()  # type: ignore[arg-type]


def read(picture: Picture) -> Seen:
    """What is at each place, from the pixels alone: the nearest colour, and the shape by how its rows grow."""
    image, found = np.asarray(picture.pil()).astype(int), {}
    for number, name in enumerate(PLACES):
        left, top = number % 3 * 16, number // 3 * 16
        cell = image[top : top + 16, left : left + 16]
        inside = (cell != 255).any(axis=2)
        if not inside.any():
            continue
        widths = [n for n in inside.sum(axis=1).tolist() if n]
        square = len(set(widths)) == 1
        triangle = widths == sorted(widths) and not square
        tint = cell[inside][0]
        near = min(COLORS, key=lambda c: int(((tint - COLORS[c]) ** 2).sum()))
        found[name] = (near, "square" if square else "triangle" if triangle else "circle")
    return found


def solve(question: str, seen: Seen) -> tuple[str, str]:
    """Answer and work."""
    kind, *words = question.split()
    if kind == "count":
        rows = [sum(seen[p][0] == words[0] for p in seen if p[0] == row) for row in "abc"]
        return str(sum(rows)), f"{rows[0]}+{rows[1]}+{rows[2]}={sum(rows)}"
    if kind == "color" and words[0] in PLACES:
        return seen[words[0]]
    if kind == "color":
        ((place, (color, _)),) = [(p, pair) for p, pair in seen.items() if pair[1] == words[0]]
        return color, place
    (place,) = [p for p, pair in seen.items() if pair == tuple(words[-2:])]
    row, column = place
    beside = f"{row}{int(column) - 1}" if kind == "left" else f"{'abc'['abc'.index(row) - 1]}{column}"
    return " ".join(seen[beside]), f"{place} {beside}"


@pytest.mark.parametrize(
    "drawn", [training, partial(held_out, "images"), partial(held_out, "combinations"), partial(training, 7)]
)
def test_answers_are_what_the_pixels_show(drawn: Callable[[], list[Problem]]) -> None:
    problems = drawn()
    kinds = Counter(problem.question.split()[0] for problem in problems)
    assert set(kinds) == {"count", "color", "left", "above"}
    for problem in problems:
        (picture,) = problem.columns["images"]
        assert (picture.width, picture.height) == (48, 48)
        seen = read(picture)
        assert [" ".join(seen.get(place, ())) for place in PLACES] == problem.columns["scene"]
        assert (problem.answer, problem.columns["work"]) == solve(problem.question, seen)


def pairs(problem: Problem) -> set[tuple[str, ...]]:
    return {tuple(cell.split()) for cell in problem.columns["scene"] if cell}


@pytest.mark.parametrize("seed", [0, 7])
def test_three_pairs_are_in_no_training_image_and_decide_the_answers_of_their_own_set(seed: int) -> None:
    unseen = ShapePrompts(seed=seed).unseen_pairs
    assert sorted(shape for _, shape in unseen) == sorted(SHAPES) and len({color for color, _ in unseen}) == 3
    shown = set.union(*map(pairs, [*training(seed), *held_out("images", seed)]))
    assert shown == {(color, shape) for color in COLORS for shape in SHAPES} - unseen
    assert all(pairs(problem) & unseen for problem in held_out("combinations", seed))
    for problem in (problem for problem in held_out("combinations", seed) if problem.answer != "0"):
        seen = read(problem.columns["images"][0])
        hidden = {place: pair for place, pair in seen.items() if pair not in unseen}
        with suppress(KeyError, ValueError):  # what is asked about is not there
            assert solve(problem.question, hidden) != (problem.answer, problem.columns["work"])


def test_both_sets_have_to_count_as_far() -> None:
    """Each number of 0 … n among n shapes: the mean over n of 1 / (n + 1) is 0 or 1, then less."""
    sets = [ShapePrompts(questions=("count",), held_out=kind).validation(1500) for kind in ("images", "combinations")]  # type: ignore[arg-type]
    for problems in sets:
        found = Counter(int(problem.answer) for problem in problems)
        for number in range(8):
            share = sum(1 / (n + 1) for n in range(max(1, number), 8)) / 7
            assert abs(found[number] / 1500 - share) < 4 * (share / 1500) ** 0.5, number


def test_no_scene_is_in_two_splits() -> None:
    scenes = [{tuple(p.columns["scene"]) for p in problems} for problems in (training(), held_out("images"))]
    assert not scenes[0] & scenes[1] and len(scenes[0]) > 550
    source = ShapePrompts()
    assert all(map(source.is_held_out, [*held_out("images"), *held_out("combinations")]))
    assert not any(map(source.is_held_out, training()))
    assert len(held_out("images")) == len(held_out("combinations")) == 400
    demonstrated, asked = (ShapePrompts(demonstrated_share=0.3).prompts(step, count=100) for step in (-1, 1))
    assert not {tuple(p.columns["scene"]) for p in demonstrated} & {tuple(p.columns["scene"]) for p in asked}


def test_a_problem_depends_on_seed_and_number_alone() -> None:
    source = ShapePrompts(seed=3)
    later = source.prompts(5, count=8)
    assert ShapePrompts(seed=3).prompts(5, count=8) == later != source.prompts(6, count=8)
    assert source.prompts(5, count=20)[:8] == later
    assert source.validation(30)[:10] == ShapePrompts(seed=3).validation(10)
    assert ShapePrompts(seed=4).prompts(5, count=8) != later
    assert source.problem(source.drawn(12345)) == source.problem(source.drawn(12345))


def test_a_scene_with_a_question_is_one_problem_with_one_picture() -> None:
    source, other = (ShapePrompts(questions=("color",), most=3, seed=seed) for seed in (0, 1))
    scenes = [source.drawn(number) for number in range(300)]
    problems = [source.problem(scene) for scene in scenes]
    pictures = {problem.id: image_digests(problem) for problem in problems}
    assert len(pictures) < 290
    assert [image_digests(problem) for problem in problems] == [pictures[problem.id] for problem in problems]
    assert len({digest for (digest,) in pictures.values()}) == len(pictures)  # another question has other tints
    assert image_digests(other.problem(scenes[0])) != pictures[other.problem(scenes[0]).id]


def test_no_answer_is_common() -> None:
    for kind in ("count", "color", "relation"):
        source = ShapePrompts(questions=(kind,))  # type: ignore[arg-type]
        problems = source.prompts(0, count=600)
        answers = Counter(problem.answer for problem in problems)
        assert answers.most_common(1)[0][1] < 600 * 0.33, answers
        assert {problem.question.split()[0] for problem in problems} <= {kind, "left", "above"}


def test_demonstrations_are_right_unless_somebody_did_not_look() -> None:
    reward, rng = MathReward(correctness=True), random.Random(0)
    problems = [p for p in training() if p.question.startswith("count")]
    answers = [p.answer for p in problems]
    straight, worked, blind = (
        [ShapePrompts(worked_share=share, blind_share=blind).demonstration(p, rng) for p in problems]
        for share, blind in ((0, 0), (1, 0), (1, 1))
    )
    assert all(score.correct for score in reward(straight + worked, answers * 2, {}))
    assert straight[0] == f"<think></think><answer>\\boxed{{{answers[0]}}}</answer>"
    assert f"<think>{problems[0].columns['work']}</think>" in worked[0]
    assert all(text.startswith("<think></think><answer>\\boxed{") for text in blind)
    right = sum(bool(score.correct) for score in reward(blind, answers, {})) / len(problems)
    chance = sum(answers.count(answer) ** 2 for answer in set(answers)) / len(answers) ** 2
    assert abs(right - chance) < 4 * (chance * (1 - chance) / len(problems)) ** 0.5


@pytest.mark.parametrize(("blind", "with_work"), [(0.0, 0.4), (0.5, 0.2)])
def test_work_has_its_share_of_the_demonstrations_that_looked(blind: float, with_work: float) -> None:
    source, rng = ShapePrompts(questions=("count",), blind_share=blind), random.Random(0)
    problems = source.prompts(0, count=100)
    found = sum("=" in source.demonstration(p, rng) for p in problems * 5) / 500
    assert abs(found - with_work) < 4 * (with_work * (1 - with_work) / 500) ** 0.5


@pytest.mark.parametrize(("kind", "form"), [("color", "[a-z]+"), ("relation", "[a-z]+ [a-z]+")])
def test_who_does_not_look_answers_in_the_form_of_the_question(kind: str, form: str) -> None:
    source, rng = ShapePrompts(questions=(kind,), blind_share=1), random.Random(0)  # type: ignore[arg-type]
    shown = [source.demonstration(p, rng) for p in source.prompts(0, count=40)]
    assert all(re.fullmatch(rf"<think></think><answer>\\boxed{{{form}}}</answer>", text) for text in shown)
    assert len(set(shown)) > 2


@pytest.mark.parametrize("questions", [("count",), ("count", "color", "relation")])
def test_permuted_images_keep_everything_else_and_answers_go_by_chance(questions: tuple[str, ...]) -> None:
    plain, permuted = (ShapePrompts(questions=questions, permuted=p).validation() for p in (False, True))  # type: ignore[arg-type]
    assert len(permuted) == len(plain) == 400
    assert [(p.id, p.question, p.answer) for p in permuted] == [(p.id, p.question, p.answer) for p in plain]
    digests = [[image_digests(p)[0] for p in problems] for problems in (plain, permuted)]
    assert sorted(digests[0]) == sorted(digests[1])
    assert not any(a == b for a, b in zip(*digests, strict=True))
    counts = [p for p in permuted if p.question.startswith("count")]
    right = sum(solve(p.question, read(p.columns["images"][0]))[0] == p.answer for p in counts)
    common = Counter(p.answer for p in counts).most_common(1)[0][1]
    assert right <= common + 2 * (common * (1 - common / len(counts))) ** 0.5


def test_rewards_see_the_images() -> None:
    def shown(completions: list[str], images: list[tuple[Picture, ...]], answer: list[str], **_: object) -> list[float]:
        return [float(sum(c == "red" for c, _ in read(p[0]).values()) == int(a)) for p, a in zip(images, answer)]  # noqa: B905

    problems = [p for p in training() if p.question == "count red"]
    columns = {"images": [p.columns["images"] for p in problems]}
    scores = FunctionReward(function=shown)([""] * len(problems), [p.answer for p in problems], columns)
    assert [score.value for score in scores] == [1.0] * len(problems) and problems


@pytest.mark.parametrize(
    "wrong",
    [
        {"questions": ["size"]},
        {"questions": []},
        {"held_out": "all"},
        {"most": 2},
        {"worked_share": 1.5},
        {"blind_share": -0.1},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        build(PromptSource, {"class_path": "grpo_pl.data.tasks.shapes.ShapePrompts", "init_args": wrong}, "data.source")
