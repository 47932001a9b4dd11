"""Nouns behind a number or a text answer: one spelling for singular and plural."""

from __future__ import annotations

from functools import lru_cache

_IRREGULAR = {
    "people": "person", "children": "child", "grandchildren": "grandchild", "mice": "mouse", "geese": "goose",
    "feet": "foot", "teeth": "tooth", "oxen": "ox", "leaves": "leaf", "knives": "knife", "wolves": "wolf",
    "calves": "calf", "loaves": "loaf", "shelves": "shelf", "wives": "wife", "scarves": "scarf", "thieves": "thief",
    "elves": "elf", "hooves": "hoof", "dice": "die", "vertices": "vertex", "matrices": "matrix", "indices": "index",
    "axes": "axis", "radii": "radius", "foci": "focus", "maxima": "maximum", "minima": "minimum",
    "extrema": "extremum", "bacteria": "bacterium", "viruses": "virus", "polyhedra": "polyhedron",
    "tetrahedra": "tetrahedron", "cacti": "cactus", "pence": "penny", "formulae": "formula",
    "bookshelves": "bookshelf", "octahedra": "octahedron",
}  # fmt: skip


@lru_cache(maxsize=4096)
def stems(noun: str) -> frozenset[str]:
    """The possible singulars of ``noun``, in lower case: ``days`` gives ``days`` and ``day``."""
    noun = noun.casefold()
    found = {noun}
    if noun in _IRREGULAR:
        found.add(_IRREGULAR[noun])
    if noun.endswith("men"):
        found.add(noun[:-3] + "man")
    if noun.endswith("ies") and len(noun) > 4:
        found.add(noun[:-3] + "y")
    if noun.endswith("es") and len(noun) > 4:
        found.add(noun[:-2])
    if noun.endswith("s") and not noun.endswith("ss") and len(noun) > 3:
        found.add(noun[:-1])
    return frozenset(found)


def singular(noun: str) -> str:
    """One spelling for a noun in singular and plural."""
    return min(stems(noun), key=lambda stem: (len(stem), stem))


def same_noun(one: str, other: str) -> bool:
    """True for one noun in singular or plural; words before it may be left out (``red balls`` and ``balls``)."""
    ours, theirs = one.casefold().split(), other.casefold().split()
    shorter = min(len(ours), len(theirs))
    return bool(stems(ours[-1]) & stems(theirs[-1])) and ours[-shorter:-1] == theirs[-shorter:-1]


def is_plural(noun: str) -> bool:
    """True for what looks like an English noun in the plural: ``ways``, ``people``, ``women``; not ``class``."""
    regular = len(noun) > 3 and noun.isascii() and noun.endswith(("s", "men")) and not noun.endswith("ss")
    return regular or noun.casefold() in _IRREGULAR
