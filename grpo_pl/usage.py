"""A mistake on the command line becomes one line that names the nearest right spelling."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

USAGE_ERROR = 2
"""Exit status of a command line that cannot be understood."""

_UNKNOWN_FLAG = re.compile(r"^unrecognized arguments: (?P<flag>\S+)")
_UNKNOWN_KEY = re.compile(r"(?:Group '(?P<group>[\w.]+)' )?does not accept option '(?P<key>[\w.]+)'")
_UNKNOWN_ARGUMENT = re.compile(
    r"Parser key \"(?P<key>[\w.]+)\".*Problem with given class_path '(?P<path>[\w.]+)': "
    r"Option '(?P<name>[\w.]+)' is not accepted"
)
_UNKNOWN_CLASS = re.compile(r"module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'")
_NO_CLASS = re.compile(r"Parser key \"(?P<key>[\w.]+)\".* (?P<name>[\w.]+) either not accessible or invalid")
_WRONG_TYPE = re.compile(
    r"Parser key \"(?P<key>[\w.]+)\": Expected a <class '(?P<type>\w+)'>\. Got value: (?P<value>.*)"
)
_NOT_A_FILE = re.compile(r"File does not exist: '?(?P<path>[^']+)'?$")
_LONGEST = 500


class OneLineErrors(ArgumentParser):
    """An argument parser whose errors are one line, with exit status 2 and no page of usage before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)  # an abbreviation is a typo that happens to work

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        return super().format_help(*args, **kwargs).replace("``", "`")  # docstrings are written for documentation pages

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # jsonargparse tries types one after the other with parsers that raise
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "").split(" [")[0]
        print(f"{program}: error: {explain(message, list(option_names(self)))}", file=sys.stderr)
        print(f"(all options: {program} --help)", file=sys.stderr)
        self.exit(USAGE_ERROR)


def explain(message: str, options: Iterable[str]) -> str:
    """``message`` of jsonargparse on one line, and the nearest of ``options`` (``model.seed`` …) where one is meant."""
    line = " ".join(message.split())
    if found := _UNKNOWN_FLAG.search(line):
        name = found["flag"].lstrip("-").split("=")[0]
        return f"unknown option {found['flag'].split('=')[0]}{nearest(name, options, prefix='--')}"
    if found := _UNKNOWN_KEY.search(line):
        key = f"{found['group']}.{found['key']}" if found["group"] else found["key"]
        return f"unknown key {key!r}{nearest(key, options)}"
    if found := _UNKNOWN_ARGUMENT.search(line):
        hint = nearest(found["name"], _arguments(found["path"]))
        return f"{found['key']}: {found['path']} has no argument {found['name']!r}{hint}"
    if found := _UNKNOWN_CLASS.search(line):
        names = _names(found["module"])
        return f"there is no {found['module']}.{found['name']}{nearest(found['name'], names)}"
    if found := _NO_CLASS.search(line):
        return f"{found['key']}: there is no {found['name']}{nearest_class(found['name'])}"
    if found := _WRONG_TYPE.fullmatch(line):
        return f"{found['key']} must be of type {found['type']}, got {found['value']!r}"
    if found := _NOT_A_FILE.search(line):
        return f"no such file: {found['path']}"
    line = re.sub(r"^Parser key \"([\w.]+)\":", r"\1:", line)
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def nearest(name: str, candidates: Iterable[str], *, prefix: str = "") -> str:
    """``; did you mean X?``, or nothing where nothing is near. Dotted names are near by their whole or by their leaf:
    ``algorithm.beta`` means ``model.algorithm.beta``."""

    def likeness(candidate: str) -> tuple[float, float]:
        leaf = _ratio(name.rsplit(".", 1)[-1], candidate.rsplit(".", 1)[-1])
        return _ratio(name, candidate), leaf

    best = max(candidates, key=lambda candidate: sum(likeness(candidate)), default="")
    whole, leaf = likeness(best)
    return f"; did you mean {prefix}{best}?" if whole >= 0.6 or leaf >= 0.75 else ""


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def nearest_class(name: str) -> str:
    """Like :func:`nearest`, among the classes and functions of the module that ``name`` starts with, or of ours."""
    module, _, leaf = name.rpartition(".")
    if module:
        try:
            return nearest(leaf, _names(module))
        except ImportError as error:
            return f": {error}"
    ours = [vars(module) for key, module in list(sys.modules.items()) if key.startswith("grpo_pl")]
    return nearest(name, [key for names in ours for key, value in names.items() if inspect.isclass(value)])


def option_names(parser: ArgumentParser) -> Iterator[str]:
    """Dotted names of every option of ``parser`` and its subcommands."""
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                yield option[2:]
        for sub in getattr(action, "_name_parser_map", {}).values():
            yield from option_names(sub)


def _arguments(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


def _names(module: str) -> list[str]:
    return [name for name in dir(importlib.import_module(module)) if not name.startswith("_")]
