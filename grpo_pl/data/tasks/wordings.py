"""The texts of word problems: names, things, and one entry for each way of asking. Add a line to add a wording.

Wordings of training and held-out ones share no name, no noun and no verb, and no held-out sentence is built like one of
training; ``tests/data/tasks/test_word_problems.py`` holds that, so a new line that breaks it is found.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """One way of asking.

    ``steps`` are the operations, worked from left to right: ``+`` is a + b, ``*-`` is a · b − c. The text may name the
    numbers in any order. It may also hold ``{name}`` and ``{other}`` (two people), ``{they}``, ``{They}``, ``{them}``
    and ``{their}`` (pronouns of the first), and ``{items}`` (things, in the plural: every number is 2 or more).
    """

    verb: str
    """The verb that this wording has and no other; it names the wording."""
    steps: str
    text: str

    @property
    def items(self) -> tuple[str, ...]:
        """Values of ``{items}`` if not everything fits."""
        return FITTING_ITEMS.get(self.verb, ())


TRAINING_PEOPLE = {
    "she": ("Anna", "Lucy", "Mia", "Emma", "Nina", "Clara", "Rosa", "Ella"),
    "he": ("Tom", "Ben", "Sam", "Jack", "Leo", "Paul", "Max", "Luke"),
}
TRAINING_ITEMS = (
    "apples", "marbles", "stickers", "pencils", "cards", "shells", "stamps", "buttons", "beads", "balloons", "nuts",
    "pears",
)  # fmt: skip
HELD_OUT_PEOPLE = {"she": ("Ruth", "Hana", "Vera", "Greta", "Inga"), "he": ("Omar", "Igor", "Felix", "Kofi", "Hugo")}
HELD_OUT_ITEMS = ("pebbles", "candles", "ribbons", "lemons", "badges", "crayons", "postcards", "spoons")

FITTING_ITEMS = {
    "broke": ("eggs", "cups", "plates", "bowls"),
    "sold": ("rolls", "cakes", "pies", "buns"),
    "loads": ("melons", "plums", "peaches", "carrots"),
    "ate": ("cookies", "cherries", "grapes", "dates"),
}
"""Of the wordings whose verb goes with some things only."""


def _wordings(steps: str, **texts: str) -> list[Wording]:
    """Verb -> text, all of the same operations."""
    return [Wording(verb, steps, text) for verb, text in texts.items()]


ONE_STEP = (
    *_wordings(
        "+",
        gets="{name} has {a} {items} and gets {b} more. How many {items} does {name} have now?",
        puts="There are {a} {items} in a box. {name} puts {b} more into it. How many {items} are in the box?",
        buys="{name} buys {a} {items} on Monday and {b} {items} on Tuesday. How many {items} is that altogether?",
        own="How many {items} do {name} and {other} own together, if {name} has {a} and {other} has {b}?",
        finds="In the garden {name}, who already had {a} {items}, finds {b} more. How many {items} has {they} got?",
        ride="{a} children and {b} parents ride on a bus. How many people are on the bus?",
        plays="{name} plays for {a} minutes before lunch and {b} minutes after it. How long is that in minutes?",
        add="If you add {b} {items} to a pile of {a} {items}, how many {items} are in the pile?",
        climbs="{name} climbs {a} stairs, rests and climbs {b} more. How many stairs is that?",
        counted="{other} counted {a} red birds and {b} blue birds. How many birds were there?",
        grew="In April a plant was {a} inches tall. Since April it grew {b} inches. How tall is it, in inches?",
    ),
    *_wordings(
        "-",
        lost="{name} had {a} {items}. {They} lost {b} of them. How many {items} are left?",
        broke="Of the {a} {items} on the shelf, {b} fell down and broke. How many {items} are still whole?",
        gives="{name} gives {b} of {their} {a} {items} to {other}. How many {items} does {name} keep?",
        needs="{name} needs {a} {items}, but only {b} are there. How many more {items} must {they} look for?",
        sold="A bakery made {a} {items} in the morning and sold {b} of them by noon. How many {items} were not sold?",
        scored="{other} scored {b} points less than {name}, who has {a} points. How many points has {other}?",
    ),
    *_wordings(
        "*",
        fills="{name} fills {a} bags with {b} {items} each. How many {items} are in the bags?",
        stand="A hall has {a} rows, and {b} chairs stand in every row. How many chairs has the hall?",
        reads="Every day {name} reads {b} pages of a book. How many pages does {they} read in {a} days?",
        costs="One ticket costs {b} dollars. How many dollars do {a} tickets cost?",
        bring="{a} friends bring {b} {items} each to the party. How many {items} do they bring together?",
        runs="If {name} runs {b} laps in each lesson, how many laps is that in {a} lessons?",
        swims="{name} swims {a} times a week, {b} laps each time. How many laps is that in a week?",
        bear="Each of {a} bushes can bear {b} roses. How many roses can there be?",
        builds="{name} builds {a} towers of {b} blocks each. How many blocks has {they} used?",
        sleep="In a camp there are {a} tents, and {b} scouts sleep in every tent. How many scouts are in the camp?",
        draws="On each of {a} sheets {name} draws {b} stars. How many stars are on the sheets?",
    ),
    *_wordings(
        "/",
        shares="{name} shares {a} {items} equally among {b} friends. How many {items} are there for each friend?",
        packed="{a} {items} are packed into boxes of {b}. How many boxes are full?",
        cuts="{name} cuts a rope of {a} meters into {b} equal pieces. How many meters long is each piece?",
        wash="It takes {name} {a} minutes to wash {b} cars, always equally long. How many minutes does each take?",
        form="{a} players form teams of {b}. How many teams are there?",
        pays="For {b} {items} {name} pays {a} dollars. How many dollars is that for each?",
    ),
)
"""In training, and asked with numbers that training never uses."""

TWO_STEPS = (
    Wording("drops", "+-", "{name} has {a} {items}, takes {b} more and then drops {c}. How many {items} are left?"),
    Wording(
        "carries",
        "*+",
        "{name} carries {a} bags with {b} {items} each and {c} loose {items}. How many {items} is that in all?",
    ),
    Wording(
        "loads",
        "*-",
        "A farmer loads {a} boxes of {b} {items} each. Then {c} {items} go bad. How many good {items} are left?",
    ),
    Wording(
        "mixes",
        "+/",
        "{name} mixes {a} red with {b} green {items} and makes {c} equal piles. How many {items} are in each pile?",
    ),
    Wording(
        "sent",
        "--",
        "{name} started with {a} {items}. {They} sent {b} to {other} and {c} to a cousin. How many has {they} still?",
    ),
    Wording(
        "hold",
        "++",
        "Three jars hold {items}: the red one {a}, the blue one {b}, the green one {c}. How many {items} do they hold?",
    ),
    Wording(
        "ate",
        "-*",
        "{name} asked {a} friends. {b} could not come, and each of the others ate {c} {items}. How many is that?",
    ),
    Wording(
        "opens",
        "*+",
        "{name} opens {a} packs of {b} cookies each, and {other} brings {c} cookies. How many cookies is that?",
    ),
    Wording(
        "travels",
        "++",
        "{name} travels {a} miles by train, {b} miles by bus and {c} miles on foot. How many miles is that?",
    ),
    Wording(
        "divides",
        "/+",
        "{name} divides {a} {items} into {b} equal piles and adds {c} {items} to one. How many are in this pile?",
    ),
)
"""In training, and asked with numbers that training never uses."""

HELD_OUT = (
    *_wordings(
        "+",
        arrive="{a} {items} and later {b} others arrive for {name} by mail. What is the total?",
        displays="A shop displays {a} striped {items} beside {b} plain ones. Work out the sum of both kinds.",
        measures="What length, in kilometers, is a trail whose steep stretch measures {a} and whose flat stretch {b}?",
        combine="Combine {a} grams of flour with {b} grams of sugar: what weight, in grams, results?",
    ),
    *_wordings(
        "-",
        perch="{a} sparrows perch along a roof until {b} fly off. What number of sparrows stays?",
        leaks="A tank with {a} liters of water leaks {b} liters overnight. Find the liters that remain.",
        baked="While {other} baked {a} muffins, {name} baked {b} fewer. Tell how many muffins {name} baked.",
    ),
    *_wordings(
        "*",
        plants="Along each of {a} streets {name} plants {b} trees. Calculate the trees in total.",
        earns="As a gardener {name} earns {b} coins an hour. What is {their} wage, in coins, for {a} hours?",
        weighs="A crate weighs {b} kilograms. Give the kilograms of a truckload with {a} such crates.",
        covers="Cycling home and back, {name} covers {b} kilometers. State the distance of {a} such outings.",
    ),
    *_wordings(
        "/",
        split="When {b} neighbors split {a} {items} evenly, what is the portion of a single neighbor?",
        types="In {b} seconds {name} types {a} letters at a steady speed. State the letters per second.",
        seat="Provided that {b} guests sit at a table, what number of tables will seat {a} guests?",
    ),
)
"""Never in training."""
