"""The parser of every command, with what it needs of jsonargparse's private parts and of the wording of its errors
(4.53); the order of its help page is in ``cli/trainer.py``."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NoReturn, get_type_hints

import yaml
from jsonargparse import (
    ArgumentParser,
    Namespace,
    _actions,
    _common,
    _core,
    _postponed_annotations,
    _subcommands,
    _typehints,
    get_loader,
    set_dumper,
    set_loader,
    set_parsing_settings,
)
from yaml import YAMLError

from grpo_pl.config.earlier import without_removed_fields
from grpo_pl.config.presets import OBJECTIVE, PRESET, presets, with_preset_fields
from grpo_pl.config.suggestions import nearest_argument, nearest_class
from grpo_pl.config.terms import EARLIER, TERMS
from grpo_pl.moved import read_name

USAGE_ERROR = 2
"""Exit status of a command line that cannot be understood."""
_LONGEST = 500
"""Characters of an error; what follows is cut off."""


class Parser(ArgumentParser):
    """An argument parser whose errors are one line, with exit status 2 and no page of usage before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _set_up_jsonargparse()
        self._waiting: dict[str, Any] = {}  # fields of 0.3 that files and options gave, and no term has taken
        super().__init__(*args, allow_abbrev=False, **kwargs)  # an abbreviation is mostly a typo

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Removes marks of documentation pages (roles, double backquotes) and of Python (``<class …>``)."""
        for group in self._action_groups:
            group.title = (group.title or "").split(". ")[0]  # the first line, which may end in mid-sentence
        text = super().format_help(*args, **kwargs).replace("``", "`").replace("--from_ ", "--from ")
        return re.sub(r"<class '([\w.]+)'>", r"\1", re.sub(r":[a-z]+:`~?([^`]*)`", r"`\1`", text))

    typed_verb = "fit"
    """What was typed for Lightning's ``fit``."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # jsonargparse tries types one after the other with parsers that raise
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "").split(" [")[0]
        if verb := re.match(r"the following arguments are required: (fit|validate|doctor)\.", message):
            program = f"{program} {verb[1]}"
        program = program.replace(" fit", f" {self.typed_verb}")
        print(f"{program}: error: {explain(message, list(option_names(self)))}", file=sys.stderr)
        print(f"(all options: {program} --help)", file=sys.stderr)
        self.exit(USAGE_ERROR)

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Tells what a class refused, where jsonargparse tells that none of several types fits."""
        try:
            return super().instantiate(*args, **kwargs)
        except ValueError as error:
            _, text = _innermost(str(error))
            if text == " ".join(str(error).split()):
                raise
            raise ValueError(text.strip()) from error

    def _apply_actions(self, cfg: Any, parent_key: str = "", *args: Any, **kwargs: Any) -> Any:
        """Reads the fields of a preset in the place of its name, and a class of an earlier version where it is now, in
        every file and text that the parser loads, and leaves out fields that are gone."""
        if isinstance(cfg, Mapping):
            cfg = with_current_classes(cfg)
            try:
                cfg = without_removed_fields(cfg, parent_key)
                cfg = with_preset_fields(cfg, parent_key, _terms_before(), self._waiting, _class_before())
            except ValueError as error:
                raise TypeError(str(error)) from error  # which the parser reports
        return super()._apply_actions(cfg, parent_key, *args, **kwargs)


def _terms_before() -> dict[str, Any]:
    """The terms of the objective in the files and options before the one that is being read."""
    before = _actions.previous_config.get()
    found = None if before is None else before.get(TERMS) or before.get(f"{OBJECTIVE}.init_args.terms")
    return {name: term.as_dict() if isinstance(term, Namespace) else term for name, term in (found or {}).items()}


def _class_before() -> str | None:
    """The class of the objective in the files and options before the one that is being read, if they name one."""
    before = _actions.previous_config.get()
    return None if before is None else before.get(f"{OBJECTIVE}.class_path")


def with_current_classes(tree: Any) -> Any:
    """Plain values with every class path of an earlier version replaced by that of the class now."""
    if isinstance(tree, Mapping):
        return {key: with_current_classes(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [with_current_classes(value) for value in tree]
    return read_name(tree) if isinstance(tree, str) and tree.startswith("grpo_pl.") else tree


class _AsInFile(argparse.Action):
    """``--model.algorithm.preset NAME``: as a file would say it in the same place among files and options."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        *parents, name = str(option_string).lstrip("-").split(".")
        tree: Any = {name: get_loader("yaml")(values)}
        for part in reversed(parents):
            tree = {part: tree}
        _actions.ActionConfigFile.apply_config(parser, namespace, "config", json.dumps(tree))
        namespace["config"].pop()  # the list of files, in which a text is None


def add_preset_option(parser: ArgumentParser) -> None:
    """Offers `PRESET` as an option of a ``parser`` that has the objective among its settings."""
    about = f"Sets all fields of the objective but the budget. One of {', '.join(presets())}."
    container = (parser.groups or {}).get("model.algorithm", parser)
    container.add_argument(f"--{PRESET}", action=_AsInFile, metavar="NAME", default=argparse.SUPPRESS, help=about)
    hidden: dict[str, Any] = {
        "action": _AsInFile,
        "default": argparse.SUPPRESS,
        "help": argparse.SUPPRESS,
    }  # of version 0.3
    container.add_argument("--model.strategy_checked", **hidden)
    for name in sorted(EARLIER):
        container.add_argument(f"--{OBJECTIVE}.{name}", **hidden)


def option_names(parser: ArgumentParser) -> Iterator[str]:
    """Dotted names of every option of ``parser`` and its subcommands."""
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                yield option[2:]
        for sub in getattr(action, "_name_parser_map", {}).values():
            yield from option_names(sub)


def show_as(parser: ArgumentParser, name: str, shown: str) -> None:
    """Has the page of help write ``shown`` for the value of an argument."""
    for action in parser._actions:
        if action.dest == name:
            action.metavar = shown


# --- settings that jsonargparse has for the whole process -----------------------------------------------------------


_describe = False
"""True while parsers read the docstrings under the fields of dataclasses, for their help pages."""


@contextmanager
def options_described(args: Iterable[str]) -> Iterator[None]:
    """Inside, parsers describe their options if ``args`` ask for that: to read what stands under each field takes half
    a second, and only pages show it."""
    global _describe
    before, _describe = _describe, any(re.match(r"-h$|--(.+\.)?help\b|.*\bcomments\b", arg) for arg in args)
    try:
        yield
    finally:
        _describe = before


def _set_up_jsonargparse() -> None:
    """Makes the process-wide settings that every parser of ours needs; may be called again."""
    set_parsing_settings(docstring_parse_attribute_docstrings=_describe)
    set_loader("yaml", _load_argument, exceptions=(YAMLError,))
    set_dumper(
        "yaml",
        lambda tree: yaml.dump(tree, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False),
    )
    _typehints.discard_init_args_on_class_path_change = _forget_another_class
    _core.find_action_and_subcommand = _subcommands.find_action_and_subcommand = _find_action
    _postponed_annotations.get_types = _types_of


class _Dumper(yaml.SafeDumper):
    """Writes members of an enumeration of texts, such as the default of Lightning's ``Timer``, as their texts."""


_Dumper.add_multi_representer(str, lambda dumper, member: dumper.represent_str(str(getattr(member, "value", member))))

_load_yaml = get_loader("yaml")
_keep_what_fits = _typehints.discard_init_args_on_class_path_change
_find_among = _subcommands.find_action_and_subcommand
_types_by_one_module = _postponed_annotations.get_types


def _find_action(parser: Any, dest: str, exclude: Any = None) -> Any:
    """jsonargparse's search for an argument, among those that may be it: the search itself asks for the types of all
    two hundred, some three thousand times in each command."""
    if getattr(parser, "_subcommands_action", None) is not None:
        return _find_among(parser, dest, exclude)  # whose arguments are few
    flag = f"--{dest}"
    named = [action for action in parser._actions if action.dest == dest or flag in action.option_strings]
    return _find_among(SimpleNamespace(_actions=named), dest, exclude)  # type: ignore[arg-type]


def _types_of(obj: Any, logger: Any = None, parent: Any = None) -> dict[str, Any]:
    """The types of a function's arguments or a dataclass's fields.

    jsonargparse looks the names in annotations of base classes up in the module of the subclass. Where one is missing
    there, no field of the dataclass is held to its type.
    """
    if not inspect.isclass(obj):
        return _types_by_one_module(obj, logger, parent)
    found: dict[str, Any] = {}
    for kind in reversed(obj.__mro__):
        for name, hint in vars(kind).get("__annotations__", {}).items():
            with suppress(Exception):  # a name that is there for type checkers alone
                held: Any = SimpleNamespace(__annotations__={name: hint})
                found |= get_type_hints(held, vars(sys.modules[kind.__module__]), vars(kind))
    return found


def _load_argument(text: str) -> Any:
    """YAML as jsonargparse reads it, except that ``####(.+)`` (an ``answer_pattern``) is text and no comment."""
    value = _load_yaml(text)
    return text if value is None and text.lstrip().startswith("#") else value


def _forget_another_class(parser_or_action: Any, prev_val: Any, value: Any) -> None:
    """Forgets all ``init_args`` of a class that another takes the place of.

    jsonargparse keeps those that the new class accepts as well, also from item to item of two lists of equal length: a
    reward in the place of another would get its weight. A subclass of the class of `subclasses_allowed` keeps
    them: its fields were given without any class.
    """
    before = prev_val["class_path"] if prev_val and "init_args" in prev_val else None
    if before is None:  # such as fields of a dataclass, which were given without a class
        _keep_what_fits(parser_or_action, prev_val, value)
        return
    old, new = _named(before), _named(value["class_path"])
    if old in _common.subclasses_enabled_types and isinstance(new, type) and issubclass(new, old):
        return
    if old is not new:
        prev_val.pop("init_args")
        prev_val.pop("dict_kwargs", None)


def _named(path: str) -> Any:
    """The object at a dotted path, or the path itself where there is none: the parser complains about that."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return path


@contextmanager
def subclasses_allowed(kind: type) -> Iterator[None]:
    """Inside, ``class_path`` may name a subclass of this dataclass, whose fields are else given directly."""
    added = {kind} - _common.subclasses_enabled_types
    _common.subclasses_enabled_types.update(added)
    try:
        yield
    finally:
        _common.subclasses_enabled_types.difference_update(added)


# --- what its errors say --------------------------------------------------------------------------------------------


def explain(message: str, options: Iterable[str] = ()) -> str:
    """``message`` of jsonargparse on one line, and the nearest of ``options`` (``model.seed`` …) where one is meant."""
    key, text = _innermost(message)
    for pattern, say in _RULES.items():
        if found := re.search(pattern, text):
            line = say.format(key=key, **found.groupdict()) if isinstance(say, str) else say(key, found, options)
            break
    else:
        line = f"{key}: {text}"
    line = line.removeprefix(": ")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


_NESTED = (
    r"Parser key \"(?P<key>[\w.]+)\":?\s*(?P<rest>.*)",
    r"Problem with given class_path '[\w.]+':\s+(?P<rest>Parser key .*)",
    r"Unable to load config '.*' - (?P<rest>Parser key (?!.*Unable to load).*)",
    r"- Expected a path but .* either not accessible or invalid\s+- (?P<rest>.*)",
)
"""Reports that wrap the one to show."""
_ERRORS_OF_UNION = r"(?ms)Does not validate against any of the Union subtypes.*?^(?P<margin> *)Errors:\n(?P<errors>.*)"
_SAYS_NOTHING = r"Expected a|Not of type|Not a valid subclass of \w+(?!\. Got value: [^\[])"
"""Errors of a union for types that are not meant: another than the value's, or one part where a list is given."""


def _innermost(message: str) -> tuple[str, str]:
    """Dotted name of the argument and what is wrong with it, out of the nested reports of jsonargparse."""
    key, text = "", message.strip()
    while True:
        if found := next(filter(None, (re.match(f"(?s){pattern}", text) for pattern in _NESTED)), None):
            name = found.groupdict().get("key") or key
            if name != "config":  # the option that brought the file
                key = name if not key or f"{name}.".startswith(f"{key}.") else f"{key}.{name}"
            text = found["rest"]
            continue
        parts: list[str] = []
        if union := re.match(_ERRORS_OF_UNION, text):  # one for each type; their own lists stand further to the right
            errors = re.split(rf"(?m)^{union['margin']}Given value type:", union["errors"])[0]
            parts = re.split(rf"(?m)^{union['margin']}  - ", errors)
        telling = [part for part in parts if part and not re.match(_SAYS_NOTHING, part)]
        if not telling:
            return key, " ".join(text.split())
        text = telling[0]


Say = Callable[[str, re.Match[str], Iterable[str]], str]


def _unknown_flag(key: str, found: re.Match[str], options: Iterable[str]) -> str:
    from grpo_pl.config.suggestions import nearest, our_name

    flag = found["flag"].split("=")[0]
    if flag.startswith("-"):
        name = flag.lstrip("-")
        return f"unknown option {flag}{our_name(name) or nearest(name, options, prefix='--')}"
    if "=" in found["flag"] and (near := nearest(flag, options, prefix="--")):
        return f"unexpected argument {flag!r}{near}"
    hint = f"did you mean --config {flag}?" if flag.endswith((".yaml", ".yml")) else "a value follows its --option"
    return f"unexpected argument {flag!r}; {hint}"


def _unknown_key(key: str, found: re.Match[str], options: Iterable[str]) -> str:
    from grpo_pl.config.suggestions import nearest, our_name

    name = f"{found['group']}.{found['key']}" if found["group"] else found["key"]
    return f"unknown key {name!r}{our_name(name) or nearest(name, options)}"


def _no_class(key: str, found: re.Match[str], options: Iterable[str]) -> str:
    name = found["name"]
    union = re.search(r"Subtypes: \[(.*)\] Errors:", found.string)
    choice = union is not None and "typing.Literal" in union[1] and "." not in name
    if choice or not re.fullmatch(r"[A-Za-z_][\w.]*", name) or name in ("true", "false"):
        return f"{key} must be {_alternatives(union[1]) if union else 'a class or class_path'}, got {name!r}"
    return f"{key}: there is no {name}{nearest_class(name)}"


def _missing(key: str, found: re.Match[str], options: Iterable[str]) -> str:
    names = re.sub(r"\b(fit|validate|doctor)\.", "", found["names"])
    example = "sft" if "data.rows" in names else "quickstart"
    hint = f": give a configuration, such as --config configs/{example}.yaml" if names != found["names"] else ""
    return f"{names.replace(', ', ' and ')} {'are' if ',' in names else 'is'} missing{hint}"


def _no_type(key: str, found: re.Match[str], options: Iterable[str]) -> str:
    value = found["value"]
    if nested := re.fullmatch(r"NestedArg\(key='(?P<name>[\w.]+)', val='?(?P<value>.*?)'?\)", value):
        key, value = f"{key}.{nested['name']}", nested["value"]
    return f"{key} must be {_alternatives(found['type'])}, got {value!r}"


_RULES: dict[str, str | Say] = {
    r"^unrecognized arguments: (?P<flag>\S+)": _unknown_flag,
    r"(?:Group '(?P<group>[\w.]+)' )?does not accept option '(?P<key>[\w.]+)'": _unknown_key,
    r"^Option '(?P<key>[\w.]+)(?P<group>)' is not accepted": _unknown_key,
    r"class_path '(?P<path>[\w.]+)': Option '(?P<name>[\w.]+)' is not accepted": lambda key, found, _: (
        f"{key}: {found['path']} has no argument {found['name']!r}{nearest_argument(found['name'], found['path'])}"
    ),
    r"module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'": lambda key, found, _: (
        f"there is no {found['module']}.{found['name']}{nearest_class('.'.join(found.groups()))}"
    ),
    r"^Problem with given class_path '(?P<path>[\w.]+)': No module named": lambda key, found, _: (
        f"{key}: there is no {found['path']}{nearest_class(found['path'])}"
    ),
    r"^Problem with given class_path '(?P<path>[\w.]+)': (?P<why>.*)": "{key}: {path}: {why}",
    r"Expected a dot import path string: (?P<name>\S+)": _no_class,
    r"Import path (?P<path>[\w.]+) does not correspond to a subclass of (?P<base>\w+)": "{key}: {path} is no {base}",
    r"Expected an instantiatable class, but [\w.]*?(?P<base>\w+) is abstract": (
        "{key}: an entry has no class_path that says which {base} is meant"
    ),
    r"Not a valid subclass of (?P<base>\w+)\. Got value: (?P<value>.*) Subclass types": (
        "{key} must be a {base}, given by class_path and init_args, got {value!r}"
    ),
    r"^Does not validate .* Subtypes: \[(?P<type>.*)\] Errors: .* Given value: (?P<value>.*)": _no_type,
    r"^Expected a (?P<type>typing\.Literal\[.*\])\. Got value: (?P<value>.*)": _no_type,
    r"^Expected a <class '(?P<type>\w+)'>\. Got value: (?P<value>.*)": "{key} must be of type {type}, got {value!r}",
    r"^Unable to load config '(?P<path>.*?)'": "{key}: there is no file {path!r}; overlays are given as --config FILE",
    r"File does not exist: '?(?P<path>[^']+)'?$": "no such file: {path}",
    r"^the following arguments are required: (?P<names>.*)": _missing,
}
"""Pattern of a report -> the line to print; the first that matches counts."""


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
