"""Every room keeps to the lines that CONTRIBUTING.md allows it."""

import re
from pathlib import Path

import grpo_pl

ROOT = Path(grpo_pl.__file__).parents[1]
TABLE = (ROOT / "CONTRIBUTING.md").read_text().partition("| room | lines at most |")[2].partition("\n\n")[0]
ALLOWED = {
    room: int(lines.replace(",", "")) for room, lines in re.findall(r"^\| `?([\w ]+)/?`? \| ([\d,]+) \|$", TABLE, re.M)
}
ROOMS = sorted({"serve", *(file.parent.name for file in (ROOT / "grpo_pl").glob("*/__init__.py"))})


def test_every_room_keeps_to_its_lines() -> None:
    for room in ROOMS:
        folder = ROOT / room if room == "serve" else ROOT / "grpo_pl" / room
        lines = sum(len(file.read_text().splitlines()) for file in folder.rglob("*.py"))
        assert 0 < lines <= ALLOWED.get(room, ALLOWED["any other"]), room


def test_the_table_names_rooms_that_exist() -> None:
    assert len(ALLOWED) == 13 and set(ALLOWED) - {"any other"} <= set(ROOMS)
