"""The way from YAML, options or plain values to objects, for every verb and the server.

    config = read(["configs/gsm8k.yaml", "mine.yaml"], ["--data.source.val_share=0.1"])
    source = config.build("data.source", PromptSource)
    rewards = build(list[Reward], manifest["rewards"], "rewards")

Later files win over earlier ones and options over files, field by field; a class that takes the place of another keeps
none of its fields. `grpo-pl fit` and `grpo-pl validate` read by the same rules through Lightning's command line.
"""

from __future__ import annotations

import inspect
import re
import sys
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import Namespace, get_loader

from grpo_pl.config.jsonargparse_adapter import Parser, add_preset_option, explain, option_names, subclasses_allowed
from grpo_pl.config.presets import OBJECTIVE, PRESET
from grpo_pl.environment import Environment
from grpo_pl.rewards.base import Reward
from grpo_pl.rewards.batch import check_rewards
from grpo_pl.rewards.trust import SOURCES, check_environment_trusted, check_rewards_trusted

T = TypeVar("T")
ConfigArguments = str | Path | list[str] | None
"""One file, or several files and options such as ``--data.source.digits=3``, in their order."""

_load_yaml = get_loader("yaml")
"""The parser's own reading of YAML, so that a value means the same in a file of a run and on its way to the parser."""


class _Quoting(yaml.SafeDumper):
    """Writes every text in quotes: the parser takes more texts for numbers, such as 1e3, than PyYAML does."""


_Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


class ConfigError(ValueError):
    """Settings that an object cannot be built from; the message is one line for the user."""


def read(files: Sequence[Path | str], options: Sequence[str] = ()) -> Config:
    """Settings of YAML files and of options such as ``--data.source.digits=3``, later ones over earlier ones."""
    return Config(tuple(map(str, files)), tuple(read_tree(Path(file)) for file in files), tuple(options))


def settings(given: ConfigArguments, *keys: str) -> Config:
    """The settings that a verb reads, of which it uses those under ``keys``, such as ``data.source``."""
    from grpo_pl.config.suggestions import nearest

    items = [str(given)] if isinstance(given, str | Path) else given or []
    options = [item for item in items if item.startswith("--")]
    for option in options:
        name = option.partition("=")[0].removeprefix("--")
        if not any(f"{name}.".startswith((f"{key}.", f"{key}+.")) for key in keys):
            hint = nearest(name, keys) or f": of a configuration, this command reads {', '.join(keys)}"
            raise ConfigError(f"unknown option --{name}{hint}")
    return read([item for item in items if not item.startswith("--")], options)


def read_tree(file: Path) -> dict[str, Any]:
    """The settings of one YAML file as they stand there."""
    if file.is_dir():
        inside = file / "config.yaml"
        raise ValueError(f"{file} is a folder; give a file" + (f", such as {inside}." if inside.is_file() else "."))
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    try:
        tree = _load_yaml(file.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ValueError(f"{file}{where}: {error.problem or 'no YAML'}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no YAML: {error}") from error
    if not isinstance(tree, dict):
        what = "is empty" if tree is None else f"holds {str(tree)[:40]!r}"
        raise ValueError(f"{file} {what}; a configuration is a mapping such as `data: {{steps: 100}}`.")
    folder = file.resolve().parent
    if str(folder.parent) not in sys.path and _names_module(tree, f"{folder.name}."):
        # `tides/config.yaml` may name `tides.task.Right`, wherever it is read; last, to shadow nothing
        sys.path.append(str(folder.parent))
    return tree


def _names_module(tree: Any, start: str) -> bool:
    """True if a ``class_path`` at any depth begins with ``start``."""
    if isinstance(tree, Mapping):
        return str(tree.get("class_path", "")).startswith(start) or any(_names_module(v, start) for v in tree.values())
    return isinstance(tree, list) and any(_names_module(value, start) for value in tree)


def build(kind: Callable[..., T], value: Any, key: str) -> T:
    """An object of ``kind`` from plain values: fields, or ``class_path`` and ``init_args``, or a list of these.

    Args:
        key: what the value is called in error messages, such as ``rewards``.

    Raises:
        ConfigError: one line that names the field and the nearest right spelling.
        ValueError: values that the object itself refuses.
    """
    tree = value.as_dict() if isinstance(value, Namespace) else value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    return Config((), (tree,), ()).build(key, kind)


def build_rewards(specs: Sequence[Mapping[str, Any]], *, trust_rewards: bool = False) -> list[Reward]:
    """The rewards of ``class_path`` and ``init_args`` pairs, with those that they hold in turn.

    Args:
        trust_rewards: build any class; else only those that ``grpo_pl.rewards.trust`` lets load by themselves.

    Raises:
        ValueError: a class that cannot be imported, is no reward or refuses its arguments, or a list that
            ``check_rewards`` refuses.
    """
    if not trust_rewards:
        check_rewards_trusted(specs)
    rewards = build(list[Reward], list(specs), "rewards")
    check_rewards(rewards)
    return rewards


def closed_rewards(specs: Sequence[Mapping[str, Any]], *, trust_rewards: bool = False) -> list[Reward]:
    """The rewards that `build_rewards` builds, closed at once: what they say of themselves can be read."""
    rewards = build_rewards(specs, trust_rewards=trust_rewards)
    for reward in rewards:
        reward.close()
    return rewards


def build_environment(spec: Mapping[str, Any], *, trust: bool = False) -> Environment:
    """The environment of a ``class_path`` and its ``init_args``.

    Args:
        trust: build any class; else only those that ``grpo_pl.rewards.trust`` lets load by themselves.

    Raises:
        ValueError: a class that cannot be imported, is no environment or refuses its arguments.
    """
    if not trust:
        check_environment_trusted(spec)
    return build(Environment, dict(spec), "environment")


@dataclass(frozen=True)
class Config:
    """Settings of files and options; nothing is imported or built before it is asked for."""

    files: tuple[str, ...]
    trees: tuple[Mapping[str, Any], ...]
    options: tuple[str, ...]

    def get(self, key: str) -> Any:
        """The value of ``key``, such as ``model.policy.path``, in the last file that has it; else None."""
        return next((found for tree in reversed(self.trees) if (found := _at(tree, key)) is not None), None)

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None or any(_concerns(option, key) for option in self.options)

    def build(self, key: str, kind: Callable[..., T]) -> T:
        """The object of ``kind`` that the settings under ``key`` describe, or its defaults where there are none.

        Raises:
            ConfigError: nothing under ``key`` where something is needed, or settings that are no ``kind``; one line
                that names the field and the nearest right spelling.
            ValueError: values that the object itself refuses.
        """
        with self.own_objective():
            parser, settings = self._parsed(key, kind)
            built: T = parser.instantiate(settings)[key]
        return built

    def settings(self, key: str, kind: Any) -> Namespace:
        """All fields under ``key`` with their values, checked as `build` does; nothing is built."""
        with self.own_objective():
            found: Namespace = self._parsed(key, kind)[1][key]
        return found

    def own_objective(self) -> AbstractContextManager[None]:
        """Inside, the objective may be of a class of one's own, if a file or an option names one; else parsers offer
        its fields directly."""
        given = [_at(tree, OBJECTIVE) for tree in self.trees]
        for option in self.options:
            flag, _, text = option.partition("=")
            if flag in (f"--{OBJECTIVE}", f"--{OBJECTIVE}.class_path"):
                given.append(yaml.safe_load(text) if text.startswith("{") else text)
        if not any(map(_names_class, given)):
            return nullcontext()
        from grpo_pl.objective.algorithm import GRPOAlgorithm

        return subclasses_allowed(GRPOAlgorithm)

    def _parsed(self, key: str, kind: Any) -> tuple[Parser, Namespace]:
        if getattr(kind, "__module__", "").startswith("grpo_pl.data."):
            import_named_sources(self)
        has_fields = inspect.isclass(kind) and not inspect.isabstract(kind)
        if key not in self and not has_fields:
            raise ConfigError(f"{' and '.join(self.files)} has no {key}.")
        parser = Parser(exit_on_error=False)
        parser.add_argument("--config", action="config")
        if has_fields and not is_dataclass(kind):
            parser.add_class_arguments(kind, key, sub_configs=True, fail_untyped=False)
        else:
            parser.add_argument(f"--{key}", type=kind, sub_configs=True)
        if _concerns(f"--{PRESET}", key):
            add_preset_option(parser)
        given = [found for tree in self.trees if (found := _only(tree, key))]
        require_fields(given, parser.groups or ())
        texts = [yaml.dump(tree, Dumper=_Quoting, default_flow_style=True, width=10**9) for tree in given]
        try:
            return parser, parser.parse_args(
                [*(f"--config={text}" for text in texts), *(o for o in self.options if _concerns(o, key))]
            )
        except ArgumentError as error:
            raise ConfigError(explain(error.message, list(option_names(parser)))) from error


def import_named_sources(given: Config) -> None:
    """Imports the shipped sources that a configuration names, so that a bare ``SortingPrompts`` is found."""
    words = set(re.findall(r"\w+", repr((given.trees, given.options))))
    for module, names in SOURCES.items():
        if not words.isdisjoint(names):
            import_module(f"grpo_pl.data.{module}")


def import_shipped_sources() -> None:
    """Imports all shipped sources, for pages that list them and for errors that look for a name near to another."""
    for module in SOURCES:
        import_module(f"grpo_pl.data.{module}")


def require_fields(trees: Iterable[Mapping[str, Any]], groups: Iterable[str]) -> None:
    """Refuses a list, a number or null where one of ``groups``, such as ``model.sampling``, has fields.

    jsonargparse lets some of these pass and complains about something else for others."""
    for tree in trees:
        for key in groups:
            *parents, name = key.split(".")
            parent = _at(tree, ".".join(parents)) if parents else tree
            given = parent.get(name, {}) if isinstance(parent, Mapping) else {}
            if not isinstance(given, Mapping | str):  # a text is the name of a file with the fields
                raise ConfigError(f"{key} must be a mapping of fields, got {'null' if given is None else given}.")


def gather(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of a verb without its configuration, and that, as `settings` reads it: the files of ``--config``
    and every option with a dot."""
    rest: list[str] = []
    config: list[str] = []
    waiting = list(args)
    while waiting:
        arg = waiting.pop(0)
        flag, equals, value = arg.partition("=")
        has_value = equals or (waiting and (" " in waiting[0] or not waiting[0].startswith("--")))  # as in argparse
        if not (flag == "--config" or (flag.startswith("--") and "." in flag)) or not has_value:
            rest.append(arg)
            continue
        value = value if equals else waiting.pop(0)
        config.append(value if flag == "--config" else f"{flag}={value}")
    return rest, config


def read_arguments(args: Sequence[str]) -> Config:
    """The configuration in the arguments of a verb whose own parser names the files that are missing."""
    _, items = gather(args)
    files = [item for item in items if not item.startswith("--") and Path(item).is_file()]
    return read(files, [item for item in items if item.startswith("--")])


def _names_class(given: Any) -> bool:
    """True for ``class_path`` among fields, and for `my_parts.MyAlgorithm`, unless it is a file with the fields."""
    if isinstance(given, Mapping):
        return "class_path" in given
    dotted = isinstance(given, str) and "." in given and all(part.isidentifier() for part in given.split("."))
    return dotted and not given.endswith((".yaml", ".yml")) and not Path(given).is_file()


def _at(tree: Mapping[str, Any], key: str) -> Any:
    """``tree["a"]["b"]`` for the key ``a.b``, which may be written out as one; None where there is none."""
    if key in tree:
        return tree[key]
    inner = ((value, key.removeprefix(f"{name}.")) for name, value in tree.items() if key.startswith(f"{name}."))
    found = (_at(value, rest) for value, rest in inner if isinstance(value, Mapping))
    return next((value for value in found if value is not None), None)


def _only(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The branch of ``tree`` that leads to ``key``, or what is written out below it (``model.sampling.stop``); what is
    added to a list there (``rewards+``) belongs to it."""
    found = {}
    for name, value in tree.items():
        if _concerns(str(name), key):
            found[name] = value
        elif key.startswith(f"{name}.") and isinstance(value, Mapping):
            inner = _only(value, key.removeprefix(f"{name}."))
            found |= {name: inner} if inner else {}
    return found


def _concerns(option: str, key: str) -> bool:
    name = option.partition("=")[0].removeprefix("--").removesuffix("+")
    return f"{name}.".startswith(f"{key}.")
