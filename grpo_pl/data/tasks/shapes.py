"""``ShapePrompts``: questions about drawn shapes, for a policy that sees images."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from grpo_pl.data.tasks.generated import HELD_OUT_SHARE, GeneratedPrompts
from grpo_pl.functional.argument_checks import check_choice, check_within
from grpo_pl.functional.sampling import row_key
from grpo_pl.types import Problem

if TYPE_CHECKING:
    from grpo_pl.extras.images.picture import Picture

Question = Literal["count", "color", "relation"]
HeldOut = Literal["images", "combinations"]
COLORS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 89, 200), "yellow": (235, 200, 30)}
SHAPES = ("circle", "square", "triangle")
PAIRS = tuple((color, shape) for color in COLORS for shape in SHAPES)
SIDE = 3
"""Places in a row, and rows."""
PLACE = 16
"""Pixels of a place in each direction."""
PLACES = tuple(f"{row}{column + 1}" for row in "abc"[:SIDE] for column in range(SIDE))
DEFAULT_HELD_OUT = 400
"""Held-out problems where no number is asked for."""
TRIES = 1000
"""Draws of a scene to which a question can be asked."""

Pair = tuple[str, str]
"""Colour and shape."""
Scene = tuple[Pair | None, ...]
"""What is at each of `PLACES`."""


class Drawn(NamedTuple):
    """A scene with a question."""

    scene: Scene
    question: str
    answer: str
    work: str
    """What a demonstration writes before the answer."""


@dataclass(kw_only=True)
class ShapePrompts(GeneratedPrompts):
    """Questions about 48x48 pixels with one to seven shapes on a grid of three rows, a to c, and three columns, 1 to 3.

    - ``count red``: how many shapes are red, from 0 on. Work: the counts of the rows and their sum, ``1+0+2=3``.
    - ``color b2``, ``color circle``: the colour of what is at a place, or of the only circle. Work: its shape, or its
      place.
    - ``left of red circle``, ``above red circle``: what is there, ``blue square``. Work: the place of the circle, which
      is the only red one, and the one beside it.

    Tints, sizes and places within the grid vary by a little. Three of the twelve pairs of colour and shape, one of each
    shape, are in no training image. Scenes are held out by a hash, whatever is asked about them. A problem depends on
    the seed and its number alone. Column ``scene``: what is at each place, row by row.
    """

    questions: tuple[Question, ...] = ("count", "color", "relation")
    """Kinds of questions, asked equally often."""
    held_out: HeldOut = "images"
    """Kind of held-out problems: other images of the pairs of training, or images with pairs that no training image
    has: one of these is asked about, or counted, or beside others where nothing is to be counted. Both have to count
    as far, equally often."""
    permuted: bool = False
    """Give each held-out problem the image of another one: a policy that looks at its images answers by chance."""
    worked_share: float = 0.4
    """Share of demonstrations with work, of those that are right; the others of them give the answer straight away."""
    blind_share: float = 0.0
    """Share of demonstrations that were written without looking: their answer is that to a question of the same kind
    about another image, and most are wrong."""
    most: int = 7
    """Most shapes of an image."""

    MORE: ClassVar[str] = "ask for fewer."

    def __post_init__(self) -> None:
        check_choice("held_out", self.held_out, HeldOut)
        for question in self.questions:
            check_choice("questions", question, Question)
        if not self.questions:
            raise ValueError("questions is empty: give count, color or relation.")
        check_within("[0, 1]", "data.source", worked_share=self.worked_share, blind_share=self.blind_share)
        check_within("[3, 9]", "data.source", most=self.most)
        rng = random.Random(row_key(self.seed, "held-out pairs"))
        self._unseen = frozenset(zip(rng.sample(list(COLORS), len(SHAPES)), SHAPES, strict=True))
        self._seen = tuple(pair for pair in PAIRS if pair not in self._unseen)

    @property
    def unseen_pairs(self) -> frozenset[Pair]:
        """The pairs of colour and shape that are in no training image."""
        return self._unseen

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        drawn, looking = rng.random(), 1 - self.blind_share
        work = prompt.columns["work"] if drawn < looking * self.worked_share else ""
        answer = prompt.answer if drawn < looking else self._asked(_kind(prompt.question), rng).answer
        return f"<think>{work}</think><answer>\\boxed{{{answer}}}</answer>"

    def validation(self, count: int | None = None) -> list[Problem]:
        problems = super().validation(DEFAULT_HELD_OUT if count is None else count)
        if not self.permuted:
            return problems
        from grpo_pl.extras.images.permuted import with_images_of_others

        return with_images_of_others(problems, self.seed)

    def candidates(self, split: Literal["train", "val"], *place: int, count: int) -> Iterator[Problem]:
        of_split = [self.held_out] if split == "val" else place
        for index in range(1000 * count):
            number = row_key(self.seed, split, *of_split, index)
            unseen = split == "val" and self.held_out == "combinations"
            drawn = self.drawn(number, unseen=unseen)
            if unseen or self._hash_holds_out(drawn.scene) == (split == "val"):
                yield self.problem(drawn)

    def drawn(self, number: int, *, unseen: bool = False) -> Drawn:
        """The scene and question of a number.

        Args:
            unseen: it has a pair that training never has.
        """
        rng = random.Random(row_key(self.seed, "shapes", number))
        return self._asked(rng.choice(self.questions), rng, unseen)

    def _asked(self, kind: Question, rng: random.Random, unseen: bool = False) -> Drawn:
        """A scene with a question of a kind."""
        ask = {"count": self._count, "color": self._color, "relation": self._relation}[kind]
        return next(filter(None, (ask(rng, unseen) for _ in range(TRIES))))

    def problem(self, drawn: Drawn) -> Problem:
        """One scene with one question is one problem, and always drawn alike."""
        number = row_key("shapes", *map(str, drawn.scene), drawn.question)
        return Problem(
            id=number,
            question=drawn.question,
            answer=drawn.answer,
            columns={
                "images": (picture(drawn.scene, row_key(self.seed, "drawing", number)),),
                "scene": [" ".join(pair) if pair else "" for pair in drawn.scene],
                "work": drawn.work,
            },
        )

    def identity(self, problem: Problem) -> tuple[str, ...]:
        """The scene."""
        return tuple(problem.columns["scene"])

    def is_held_out(self, problem: Problem) -> bool:
        return self._hash_holds_out(scene_of(problem)) or not self._unseen.isdisjoint(scene_of(problem))

    def _hash_holds_out(self, scene: Scene) -> bool:
        return row_key(self.seed, "split", *map(str, scene)) % HELD_OUT_SHARE == 0

    def _pairs(self, unseen: bool) -> tuple[Sequence[Pair], Sequence[Pair]]:
        """The pairs of which one is asked about, and those that may be in the scene."""
        return (sorted(self._unseen), PAIRS) if unseen else (self._seen, self._seen)

    def _count(self, rng: random.Random, unseen: bool) -> Drawn:
        """Among n shapes, each number from 0 to n is equally likely."""
        asked, pairs = self._pairs(unseen)
        color, total = _one_of(asked, rng)[0], rng.randint(1, self.most)
        count = rng.randint(0, total)
        mine, others = ([pair for pair in pairs if (pair[0] == color) == same] for same in (True, False))
        chosen = [_one_of(mine if number < count else others, rng) for number in range(total)]
        chosen[0] = _one_of([pair for pair in asked if (pair[0] == color) == (count > 0)], rng)
        scene = _scattered(chosen, rng)
        rows = [sum(pair is not None and pair[0] == color for pair in scene[at : at + SIDE]) for at in _ROWS]
        return Drawn(scene, f"count {color}", str(count), f"{'+'.join(map(str, rows))}={count}")

    def _color(self, rng: random.Random, unseen: bool) -> Drawn:
        asked, pairs = self._pairs(unseen)
        pair, total = _one_of(asked, rng), rng.randint(1, self.most)
        by_place = rng.random() < 0.5
        others = [other for other in pairs if by_place or other[1] != pair[1]]
        scene = _scattered([pair, *(_one_of(others, rng) for _ in range(total - 1))], rng)
        at = PLACES[rng.choice([place for place, there in enumerate(scene) if there == pair])]
        named, work = (at, pair[1]) if by_place else (pair[1], at)
        return Drawn(scene, f"color {named}", pair[0], work)

    def _relation(self, rng: random.Random, unseen: bool) -> Drawn | None:
        """None for a scene in which nothing is there."""
        asked, pairs = self._pairs(unseen)
        pair, total = _one_of(asked, rng), rng.randint(2, self.most)
        others = [other for other in pairs if other != pair]
        scene = _scattered([pair, *(_one_of(others, rng) for _ in range(total - 1))], rng)
        at, left = scene.index(pair), rng.random() < 0.5
        beside = at - 1 if left else at - SIDE
        if beside < 0 or (left and at % SIDE == 0) or (there := scene[beside]) is None:
            return None
        question = f"{'left of' if left else 'above'} {' '.join(pair)}"
        return Drawn(scene, question, " ".join(there), f"{PLACES[at]} {PLACES[beside]}")


def _kind(question: str) -> Question:
    """The kind of a question."""
    first = question.split()[0]
    return "count" if first == "count" else "color" if first == "color" else "relation"


_ROWS = range(0, SIDE * SIDE, SIDE)


def _one_of(pairs: Sequence[Pair], rng: random.Random) -> Pair:
    """Each colour is equally likely, whatever number of shapes it has."""
    color = rng.choice([color for color in COLORS if any(pair[0] == color for pair in pairs)])
    return rng.choice([pair for pair in pairs if pair[0] == color])


def _scattered(pairs: list[Pair], rng: random.Random) -> Scene:
    """These shapes at random places."""
    places = dict(zip(rng.sample(range(SIDE * SIDE), len(pairs)), pairs, strict=True))
    return tuple(places.get(place) for place in range(SIDE * SIDE))


def scene_of(problem: Problem) -> Scene:
    """The scene in a problem's column."""
    return tuple((pair[0], pair[1]) if (pair := cell.split()) else None for cell in problem.columns["scene"])


def picture(scene: Scene, key: int) -> Picture:
    """Draws a scene; ``key`` names the tints, sizes and shifts."""
    from grpo_pl.extras.images.picture import Picture, pillow

    image = pillow().new("RGB", (SIDE * PLACE, SIDE * PLACE), "white")
    from PIL import ImageDraw

    draw, rng = ImageDraw.Draw(image), random.Random(key)
    for place, pair in enumerate(scene):
        if pair is None:
            continue
        tint = tuple(min(255, max(0, value + rng.randint(-20, 20))) for value in COLORS[pair[0]])
        radius = rng.randint(4, 6)
        x, y = (at * PLACE + PLACE // 2 + rng.randint(radius - 7, 7 - radius) for at in (place % SIDE, place // SIDE))
        box = (x - radius, y - radius, x + radius, y + radius)
        if pair[1] == "circle":
            draw.ellipse(box, fill=tint)
        elif pair[1] == "square":
            draw.rectangle(box, fill=tint)
        else:
            draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=tint)
    return Picture.of(image.tobytes(), *image.size)
