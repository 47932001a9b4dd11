"""Gathers the wheels that an offline machine with a GPU lacks for ``benchmarks/gpu_proof.py``, into one folder.

Run where there is a package index::

    python benchmarks/gpu_wheels.py FOLDER [--there FILE]

What that machine has is never fetched: the names in ``gpu_machine.txt``, or those that its own ``pip list
--format=freeze`` printed into FILE.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from email.parser import HeaderParser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

HERE = Path(__file__).resolve().parent
PYTHON = "3.12"
LIMIT_MIB = 64
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)), "manylinux2014_x86_64"]
ALSO = ["docstring-parser"]
"""What the tests need besides."""


def wanted() -> list[Requirement]:
    """What the package, the comparison with TRL and the tests need directly."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["bench"], *ALSO]
    return [Requirement(line) for line in lines]


def names(file: Path) -> set[str]:
    """Names of packages, one a line, with or without ``==version``."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return {canonicalize_name(line.partition("==")[0].partition(" @ ")[0]) for line in lines if line}


def needs(wheel: Path, extras: Iterable[str] = ()) -> list[Requirement]:
    """What a wheel requires under `PYTHON` on Linux, with those of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1)
        lines = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    there: dict[str, str | AbstractSet[str]] = {
        **default_environment(),  # type: ignore[dict-item]  # a TypedDict of texts
        "python_version": PYTHON,
        "python_full_version": f"{PYTHON}.3",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    found = [Requirement(line) for line in lines]
    asked = ["", *extras]
    return [r for r in found if not r.marker or any(r.marker.evaluate({**there, "extra": extra}) for extra in asked)]


def fetch(requirement: Requirement, folder: Path) -> Path:
    """Downloads the newest wheel that fits, in place of another version of it.

    Raises:
        ValueError: the index has none.
    """
    name = canonicalize_name(requirement.name)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={PYTHON}", "--implementation=cp", *(f"--platform={each}" for each in PLATFORMS)]
    for old in _wheels(folder, name):
        old.unlink()
    done = subprocess.run(
        [*command, f"--dest={folder}", f"{name}{requirement.specifier}"], capture_output=True, text=True
    )
    found = _wheels(folder, name)
    if done.returncode or len(found) != 1:
        raise ValueError(f"no wheel of {requirement} for Python {PYTHON} on Linux:\n{done.stderr[-1000:]}")
    return found[0]


def _wheels(folder: Path, name: str) -> list[Path]:
    return [file for file in folder.glob("*.whl") if parse_wheel_filename(file.name)[0] == name]


def gather(requirements: Iterable[Requirement], there: set[str], folder: Path) -> dict[str, Path]:
    """Name -> wheel of all that is required, directly or not, and not ``there``."""
    found: dict[str, Path] = {}
    asked: dict[str, Requirement] = {}
    todo = list(requirements)
    while todo:
        requirement = todo.pop(0)
        name = canonicalize_name(requirement.name)
        if name in there:
            continue
        before = asked.setdefault(name, Requirement(name))
        known = name in found
        specifier, extras = before.specifier & requirement.specifier, before.extras | requirement.extras
        if known and extras == before.extras and parse_wheel_filename(found[name].name)[1] in specifier:
            before.specifier = specifier
            continue
        before.specifier, before.extras = specifier, extras
        found[name] = fetch(before, folder)
        todo += needs(found[name], extras)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheels go; made if needed")
    parser.add_argument("--there", type=Path, default=HERE / "gpu_machine.txt", help="packages of that machine")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found = gather(wanted(), names(arguments.there), arguments.folder)
    size = sum(wheel.stat().st_size for wheel in found.values()) / 2**20
    print(*sorted(wheel.name for wheel in found.values()), f"{len(found)} wheels, {size:.1f} MiB", sep="\n")
    if size > LIMIT_MIB:
        sys.exit(f"more than {LIMIT_MIB} MiB: look for what that machine might have by itself")


if __name__ == "__main__":
    main()
