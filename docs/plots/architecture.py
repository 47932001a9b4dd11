"""Draws docs/images/architecture.svg from the imports of the package: which room leans on which.

    python docs/plots/architecture.py           # writes the picture
    python docs/plots/architecture.py --check   # status 1 if the picture is not that of the code

An arrow means "imports"; one that follows from two others is left out. Imports for type checkers only are not drawn,
nor are those of extras: the server alone has some.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
WIDTH, ROW, BOX, GAP = 960, 92, 46, 18


def room_of(module: str) -> str | None:
    """``grpo_pl.rollout.engine`` -> ``rollout``, ``serve.server`` -> ``serve``; None for everything else."""
    top, _, rest = module.partition(".")
    if top == "serve":
        return "serve"
    room = rest.partition(".")[0]
    return room if top == "grpo_pl" and room else None


def imports(file: Path) -> Iterator[str]:
    """The modules that a file imports, at the top or inside functions, except for type checkers."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_imports(root: Path) -> dict[str, set[str]]:
    """Room -> the rooms it imports."""
    found: dict[str, set[str]] = {}
    for file in sorted([*root.glob("grpo_pl/**/*.py"), *root.glob("serve/**/*.py")]):
        room = room_of(".".join(file.relative_to(root).with_suffix("").parts))
        if room is not None and not room.startswith("__") and file.name != "__main__.py":
            others = {room_of(name) for name in imports(file)} - {None, room, "extras"}
            found.setdefault(room, set()).update(other for other in others if other and not other.startswith("__"))
    return {room: {other for other in others if other in found} for room, others in found.items()}


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """Room -> length of the longest way down from it.

    Raises:
        ValueError: rooms that import each other in a circle.
    """
    heights: dict[str, int] = {}

    def height(room: str, way: tuple[str, ...]) -> int:
        if room in way:
            raise ValueError("rooms import each other in a circle: " + " → ".join((*way, room)))
        if room not in heights:
            heights[room] = max((1 + height(other, (*way, room)) for other in sorted(graph[room])), default=0)
        return heights[room]

    for room in sorted(graph):
        height(room, ())
    return heights


def reduced(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that follow from no others."""

    def below(room: str) -> set[str]:
        return set().union(*({other} | below(other) for other in graph[room])) if graph[room] else set()

    return [
        (room, other)
        for room in sorted(graph)
        for other in sorted(graph[room])
        if not any(other in below(between) for between in graph[room] - {other})
    ]


def draw(graph: dict[str, set[str]]) -> str:
    """The picture as SVG: rooms on floors, the highest on top, every arrow pointing down."""
    heights = floors(graph)
    top = max(heights.values())
    rows = [[room for room in sorted(graph) if heights[room] == floor] for floor in range(top + 1)]
    place: dict[str, tuple[float, float]] = {}
    boxes, lines = [], []
    for floor, rooms in enumerate(rows):
        y = 30 + (top - floor) * ROW
        wide = min(150.0, (WIDTH - GAP) / len(rooms) - GAP)
        left = (WIDTH - len(rooms) * (wide + GAP) + GAP) / 2 + (floor % 2) * 34 - 17
        for i, room in enumerate(rooms):
            x = left + i * (wide + GAP)
            place[room] = (x + wide / 2, y)
            boxes.append(
                f'<rect x="{x:.0f}" y="{y}" width="{wide:.0f}" height="{BOX}" rx="6" class="room"/>'
                f'<text x="{x + wide / 2:.0f}" y="{y + BOX / 2 + 5:.0f}" text-anchor="middle">{escape(room)}</text>'
            )
    for room, other in reduced(graph):
        (x1, y1), (x2, y2) = place[room], place[other]
        bend = (y1 + BOX + y2) / 2
        lines.append(
            f'<path d="M{x1:.0f} {y1 + BOX} C{x1:.0f} {bend:.0f} {x2:.0f} {bend:.0f} {x2:.0f} {y2 - 7}" '
            'class="arrow" marker-end="url(#tip)"/>'
        )
    height = 30 + (top + 1) * ROW
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            "<title>The rooms of the package; an arrow means imports</title>",
            "<style>text{font:15px sans-serif;fill:#1b2a41}.room{fill:#e8f0fa;stroke:#33658a;stroke-width:1.5}"
            ".arrow{fill:none;stroke:#7a8ba3;stroke-width:1.4}</style>",
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="4" refY="4" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="#7a8ba3"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            *lines,
            *boxes,
            "</svg>",
            "",
        ]
    )


def main() -> int:
    picture = draw(room_imports(ROOT))
    if "--check" in sys.argv[1:]:
        same = PICTURE.exists() and PICTURE.read_text() == picture
        if not same:
            print(f"{PICTURE.relative_to(ROOT)} is not that of the code: python {Path(__file__).relative_to(ROOT)}")
        return int(not same)
    PICTURE.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
