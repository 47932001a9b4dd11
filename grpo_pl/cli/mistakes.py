"""A mistake on the command line becomes one line that names the nearest right spelling."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, get_loader

from grpo_pl.cli.foreign_names import our_name
from grpo_pl.config.overlays import keep_fields_of_the_same_class_only

USAGE_ERROR = 2
"""Exit status of a command line that cannot be understood."""

TRAINER_VERBS: dict[str, str] = {
    "fit": "Trains a policy as a configuration says, into a run folder of its own.",
    "validate": "Answers the held-out problems with the policy of a configuration or checkpoint.",
}
"""Verbs of Lightning's command line."""

_LONGEST = 500
_PARTS = ("lightning.pytorch.callbacks", "lightning.pytorch.loggers")
"""Modules besides ours whose classes may be named without their module."""


class OneLineErrors(ArgumentParser):
    """An argument parser whose errors are one line, with exit status 2 and no page of usage before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        keep_fields_of_the_same_class_only()
        super().__init__(*args, allow_abbrev=False, **kwargs)  # an abbreviation is a typo that happens to work

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Docstrings are written for documentation pages: their roles and Python's own marks go."""
        for group in self._action_groups:
            group.title = (group.title or "").split(". ")[0]  # jsonargparse takes the first line, cut where it may be
        text = super().format_help(*args, **kwargs).replace("``", "`")
        return re.sub(r"<class '([\w.]+)'>", r"\1", re.sub(r":[a-z]+:`~?([^`]*)`", r"`\1`", text))

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # jsonargparse tries types one after the other with parsers that raise
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "").split(" [")[0]
        if verb := re.match(r"the following arguments are required: (fit|validate)\.", message):
            program = f"{program} {verb[1]}"
        print(f"{program}: error: {explain(message, list(option_names(self)))}", file=sys.stderr)
        print(f"(all options: {program} --help)", file=sys.stderr)
        self.exit(USAGE_ERROR)


def option_names(parser: ArgumentParser) -> Iterator[str]:
    """Dotted names of every option of ``parser`` and its subcommands."""
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                yield option[2:]
        for sub in getattr(action, "_name_parser_map", {}).values():
            yield from option_names(sub)


# --- before jsonargparse reads them ---------------------------------------------------------------------------------


def check_config_files(args: Sequence[str]) -> None:
    """Looks into the YAML files behind ``--config``; jsonargparse does not say which of several is broken.

    Raises:
        ValueError: a file is no YAML, empty, or no mapping of settings.
    """
    for path in _values_of("--config", args):
        if not Path(path).is_file():
            continue  # jsonargparse says so
        try:
            tree = yaml.safe_load(Path(path).read_text())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
            raise ValueError(f"{path}{where}: {error.problem or 'no YAML'}.") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no YAML: {error}") from error
        if not isinstance(tree, dict):
            what = "is empty" if tree is None else f"holds {str(tree)[:40]!r}"
            raise ValueError(f"{path} {what}; a configuration is a mapping such as `data: {{steps: 100}}`.")


def _values_of(option: str, args: Sequence[str]) -> Iterator[str]:
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        if arg == option:
            yield following
        elif arg.startswith(f"{option}="):
            yield arg.partition("=")[2]


_load_yaml = get_loader("yaml")


def load_argument(text: str) -> Any:
    """YAML as jsonargparse reads it, but for ``--data.source.answer_pattern '####(.+)'``, which is no comment."""
    value = _load_yaml(text)
    return text if value is None and text.lstrip().startswith("#") else value


# --- after ----------------------------------------------------------------------------------------------------------


def explain(message: str, options: Iterable[str] = ()) -> str:
    """``message`` of jsonargparse on one line, and the nearest of ``options`` (``model.seed`` …) where one is meant."""
    key, text = _innermost(message)
    for pattern, say in _RULES:
        if found := pattern.search(text):
            line = say(key, found, options)
            break
    else:
        line = f"{key}: {text}" if key else text
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


_KEY = re.compile(r"^Parser key \"(?P<key>[\w.]+)\":? ?(?P<rest>.*)")
_CLASS = re.compile(r"^Problem with given class_path '(?P<path>[\w.]+)': (?P<rest>Parser key .*)")
_LOADED = re.compile(r"^Unable to load config '.*' - (?P<rest>Parser key (?!.*Unable to load).*)")
_PATH = re.compile(r"^- Expected a path but .* either not accessible or invalid - (?P<rest>.*)")
_UNION = re.compile(
    r"^Does not validate against any of the Union subtypes .* ?Errors: - (?P<errors>.*) Given value type:"
)


def _innermost(message: str) -> tuple[str, str]:
    """Dotted name of the argument and what is wrong with it, out of the nested reports of jsonargparse."""
    key, text = "", " ".join(message.split())
    while True:
        if found := _KEY.match(text):
            name = found["key"]
            key = name if not key or name.startswith(f"{key}.") else key if name == key else f"{key}.{name}"
        elif not (found := _CLASS.match(text) or _LOADED.match(text) or _PATH.match(text)):
            errors = _UNION.match(text)
            telling = (
                [one for one in re.split(r" - ", errors["errors"]) if not one.startswith("Expected a")]
                if errors
                else []
            )
            if not telling:
                return key, text
            text = telling[0]
            continue
        text = found["rest"]


Say = Callable[[str, re.Match[str], Iterable[str]], str]


def _unknown_flag(key: str, found: re.Match[str], options: Iterable[str]) -> str:
    flag = found["flag"].split("=")[0]
    if flag.startswith("-"):
        name = flag.lstrip("-")
        return f"unknown option {flag}{our_name(name) or nearest(name, options, prefix='--')}"
    hint = f"did you mean --config {flag}?" if flag.endswith((".yaml", ".yml")) else "a value follows its --option"
    return f"unexpected argument {flag!r}; {hint}"


def _unknown_key(key: str, found: re.Match[str], options: Iterable[str]) -> str:
    name = f"{found['group']}.{found['key']}" if found["group"] else found["key"]
    return f"unknown key {name!r}{our_name(name) or nearest(name, options)}"


def _unknown_argument(key: str, found: re.Match[str], options: Iterable[str]) -> str:
    hint = nearest(found["name"].split(".")[0], ["init_args", *_arguments(found["path"])])
    return f"{key}: {found['path']} has no argument {found['name']!r}{hint or our_name(found['name'])}"


def _no_attribute(key: str, found: re.Match[str], options: Iterable[str]) -> str:
    return f"there is no {found['module']}.{found['name']}{nearest(found['name'], _names(found['module']))}"


def _no_class(key: str, found: re.Match[str], options: Iterable[str]) -> str:
    name = found["name"]
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name) or name in ("true", "false"):
        union = re.search(r"Subtypes: \[(.*)\] Errors:", found.string)
        what = _alternatives(union[1]) if union else "a class or class_path"
        return f"{key} must be {what}, got {name!r}"
    return f"{key}{': ' if key else ''}there is no {name}{nearest_class(name)}"


def _missing(key: str, found: re.Match[str], options: Iterable[str]) -> str:
    names = re.sub(r"\b(fit|validate)\.", "", found["names"])
    hint = ": give a configuration, such as --config configs/quickstart.yaml" if names != found["names"] else ""
    return f"{names.replace(', ', ' and ')} {'are' if ',' in names else 'is'} missing{hint}"


_RULES: list[tuple[re.Pattern[str], Say]] = [
    (re.compile(r"^unrecognized arguments: (?P<flag>\S+)"), _unknown_flag),
    (re.compile(r"(?:Group '(?P<group>[\w.]+)' )?does not accept option '(?P<key>[\w.]+)'"), _unknown_key),
    (re.compile(r"class_path '(?P<path>[\w.]+)': Option '(?P<name>[\w.]+)' is not accepted"), _unknown_argument),
    (re.compile(r"module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'"), _no_attribute),
    (
        re.compile(r"^Problem with given class_path '(?P<path>[\w.]+)': (?P<why>No module named .*)"),
        lambda key, found, _: f"{key}: there is no {found['path']}: {found['why']}",
    ),
    (
        re.compile(r"^Problem with given class_path '(?P<path>[\w.]+)': (?P<why>.*)"),
        lambda key, found, _: f"{key}{': ' if key else ''}{found['path']}: {found['why']}",
    ),
    (re.compile(r"Expected a dot import path string: (?P<name>\S+)"), _no_class),
    (
        re.compile(r"Import path (?P<path>[\w.]+) does not correspond to a subclass of (?P<base>\w+)"),
        lambda key, found, _: f"{key}: {found['path']} is no {found['base']}",
    ),
    (
        re.compile(r"Expected an instantiatable class, but [\w.]*?(?P<base>\w+) is abstract"),
        lambda key, found, _: f"{key}: an entry has no class_path that says which {found['base']} is meant",
    ),
    (
        re.compile(r"^Does not validate .* Subtypes: \[(?P<types>.*)\] Errors: .* Given value: (?P<value>.*)"),
        lambda key, found, _: f"{key} must be {_alternatives(found['types'])}, got {found['value']!r}",
    ),
    (
        re.compile(r"^Expected a (?P<type>typing\.Literal\[.*\])\. Got value: (?P<value>.*)"),
        lambda key, found, _: f"{key} must be {_alternatives(found['type'])}, got {found['value']!r}",
    ),
    (
        re.compile(r"^Expected a <class '(?P<type>\w+)'>\. Got value: (?P<value>.*)"),
        lambda key, found, _: f"{key} must be of type {found['type']}, got {found['value']!r}",
    ),
    (
        re.compile(r"^Unable to load config '(?P<path>.*?)'"),
        lambda key, found, _: f"{key}: there is no file {found['path']!r}; overlays are given as --config FILE",
    ),
    (
        re.compile(r"File does not exist: '?(?P<path>[^']+)'?$"),
        lambda key, found, _: f"no such file: {found['path']}",
    ),
    (re.compile(r"^the following arguments are required: (?P<names>.*)"), _missing),
]
"""What a report looks like, and the line made of it; the first that fits."""


def _alternatives(types: str) -> str:
    """Python's ``<class 'int'>, typing.Literal['a', 'b']`` as ``int, a or b``."""
    names: list[str] = []
    for choices, kind, generic in re.findall(
        r"typing\.Literal\[([^\]]*)\]|<class '([\w.]+)'>|([\w.]+)\[[^\]]*\]", types
    ):
        names += [choice.strip(" '\"") for choice in choices.split(",")] if choices else []
        name = (kind or generic).rsplit(".", 1)[-1]
        names += [{"NoneType": "null", "list": "a list", "Iterable": "a list"}.get(name, name)] if name else []
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} or {last}" if most else last


def nearest(name: str, candidates: Iterable[str], *, prefix: str = "") -> str:
    """``; did you mean X?``, or nothing where nothing is near. Dotted names are near by their last part first:
    ``algorithm.beta`` means ``model.algorithm.beta``."""
    parents, _, leaf = name.rpartition(".")

    def likeness(candidate: str) -> tuple[float, float]:
        candidate_parents, _, candidate_leaf = candidate.rpartition(".")
        begins = len(leaf) >= 4 and (candidate_leaf.startswith(leaf) or leaf.startswith(candidate_leaf))
        return max(_ratio(leaf, candidate_leaf), 0.8 * begins), _ratio(parents, candidate_parents) if parents else 0.0

    best = max(candidates, key=lambda candidate: sum(likeness(candidate)), default="")
    return f"; did you mean {prefix}{best}?" if best and likeness(best)[0] >= 0.6 else ""


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def nearest_class(name: str) -> str:
    """Like :func:`nearest`, among the classes and functions of the module that ``name`` starts with, or of those whose
    classes need no module."""
    module, _, leaf = name.rpartition(".")
    if module:
        try:
            return nearest(leaf, _names(module))
        except ImportError as error:
            return f": {error}"
    modules = [*(key for key in list(sys.modules) if key.startswith("grpo_pl.")), *_PARTS]
    return nearest(name, [leaf for module in modules for leaf in _names(module, only=_is_part)])


def _arguments(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


def _is_part(value: Any) -> bool:
    return inspect.isclass(value) and value.__module__.startswith(("grpo_pl.", *_PARTS))


def _names(module: str, only: Callable[[Any], bool] = callable) -> list[str]:
    """What a module offers to be named; abstract classes are no use to anyone."""
    offered = vars(importlib.import_module(module)).items()
    return [
        name for name, value in offered if not name.startswith("_") and only(value) and not inspect.isabstract(value)
    ]
