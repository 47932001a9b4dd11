"""``grpo-pl``: hands each verb to a LightningCLI or to a file of ``commands``; prints a user's mistake as one line."""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import json
import keyword
import os
import re
import select
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import get_type_hints

import grpo_pl
from grpo_pl.cli.commands import BRANCH, TRAINER_VERBS, VERBS, module_of
from grpo_pl.config.jsonargparse_adapter import USAGE_ERROR, Parser, explain, options_described, show_as
from grpo_pl.config.objects import ConfigError, gather, read_arguments
from grpo_pl.config.shipped import with_shipped_configs
from grpo_pl.config.terms import ROOM
from grpo_pl.distributed.orphans import end_with_launcher

DEBUG = "GRPO_PL_DEBUG"
"""Environment variable; when set, mistakes show the whole traceback."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells count it: 128 + SIGINT."""
TERMINATED = 143
"""Exit status after SIGTERM, counted likewise."""
UNREAD = 141
"""Exit status where nobody reads the output, counted likewise: 128 + SIGPIPE."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0, 1 (a mistake, a failed run, findings), 2 (usage; no
    diagnosis), 130 (Ctrl-C), 141 (nobody reads its output any more, as behind ``| head``)."""
    try:
        try:
            return _run(args)
        finally:
            sys.stdout.flush()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # which rich turns into a status of 1
            return UNREAD
        raise
    except BrokenPipeError:
        if not _is_unread():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return UNREAD


def _is_unread() -> bool:
    """True if the reader of the output has gone; a broken pipe to another process is another matter."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
    except (OSError, ValueError):  # the output is no file
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _run(args: Sequence[str] | None) -> int:
    """Does what `main` says, and raises ``BrokenPipeError`` where nobody reads the output."""
    from grpo_pl.config.suggestions import nearest

    verb, *rest = list(sys.argv[1:] if args is None else args) or ["--help"]
    if verb in ("-h", "--help"):
        print(overview())
        return 0
    if verb == "--version":
        print(grpo_pl.__version__)
        return 0
    if verb not in TRAINER_VERBS | VERBS:
        print(f"grpo-pl: error: unknown command {verb!r}{nearest(verb, TRAINER_VERBS | VERBS)}", file=sys.stderr)
        print("(all commands: grpo-pl --help)", file=sys.stderr)
        return USAGE_ERROR
    if verb in TRAINER_VERBS and split_help(rest) == (["--help"], ""):  # at once: what a parser needs takes seconds
        print(short_page(verb), end="")
        return 0
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))  # a `class_path` may name a module that lies here; last, to shadow nothing
    try:
        given, about = split_help(with_shipped_configs(rest))
        with options_described(given):
            if verb in TRAINER_VERBS and about == "terms":
                print(terms_page(), end="")
                return 0
            return _train(verb, given, about) if verb in TRAINER_VERBS else _command(verb, given)
    except KeyboardInterrupt:
        print(f"grpo-pl {verb}: stopped by Ctrl-C.", file=sys.stderr)
        return INTERRUPTED
    except ConfigError as error:
        print(f"grpo-pl {verb}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except Exception as error:  # what users cannot put right is raised again
        if os.environ.get(DEBUG) or not _is_for_users(error) or (isinstance(error, BrokenPipeError) and _is_unread()):
            raise
        print(f"grpo-pl {verb}: error: {_one_line(error)}", file=sys.stderr)
        # 1 stands for what doctor and verify find
        return USAGE_ERROR if verb in ("bisect", "compare", "doctor", "verify", "why") else 1


def overview() -> str:
    """The page of ``grpo-pl --help``: every verb with one line."""
    verbs = TRAINER_VERBS | VERBS
    width = max(map(len, verbs))
    columns = max(60, min(120, shutil.get_terminal_size().columns))
    indent = " " * (width + 4)
    lines = "\n".join(
        textwrap.fill(text, columns, initial_indent=f"  {verb:<{width}}  ", subsequent_indent=indent)
        for verb, text in verbs.items()
    )
    purpose = "Trains language models to reason by reinforcement learning with verifiable rewards."
    return f"""usage: grpo-pl COMMAND [options]

{textwrap.fill(purpose, columns)}

commands:
{lines}

grpo-pl COMMAND --help shows the options of one; grpo-pl --version the version.
Start with: grpo-pl fit --config configs/quickstart.yaml"""


def split_help(args: Sequence[str]) -> tuple[list[str], str]:
    """Arguments with a plain ``--help``, and what it was asked about: ``all``, a part such as ``model.sampling``, or
    ``""``; ``all`` where no help was asked for."""
    for place, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag not in ("-h", "--help"):
            continue
        rest = list(args[place + 1 :])
        if not equals and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        return [*args[:place], "--help", *rest], value
    return list(args), "all"


def short_page(verb: str) -> str:
    """The options that most runs set, on one screen."""
    return Path(__file__).with_name("help").joinpath(f"{verb}.txt").read_text(encoding="utf-8")


def terms_page() -> str:
    """The page of ``--help terms``: the shipped terms of the objective with their fields."""
    from grpo_pl.rewards.trust import TERMS

    pages = ["Terms of the objective, each under a name of your choice in model.algorithm.terms:\n"]
    for module, kinds in TERMS.items():
        for name in kinds:
            kind = getattr(importlib.import_module(f"{ROOM}.{module}"), name)
            parser = Parser(usage=argparse.SUPPRESS, add_help=False)
            parser.add_class_arguments(kind, as_group=False)
            told = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
            fields = parser.format_help().partition(":\n")[2].replace("--", "")
            pages.append(f"{kind.__module__}.{name}: {told}\n{fields}")
    return "\n".join(pages)


def _train(verb: str, args: list[str], help_about: str) -> int:
    end_with_launcher()
    with _imports_kept():
        from grpo_pl.policy.library_internals import import_models

        import_models()  # before Lightning does it

        from grpo_pl.policy.quiet import quiet_libraries
        from grpo_pl.rollout.engine import RolloutInterrupted

        trains_reward_model = verb == "fit" and "model.classifier" in read_arguments(args)
        if trains_reward_model or verb == "doctor":
            extra = importlib.import_module(module_of("reward model" if trains_reward_model else verb))
        elif verb == "sft":
            from grpo_pl.cli.sft import SFTCLI
        else:
            from grpo_pl.cli.trainer import GRPOCLI

    quiet_libraries()
    try:
        if trains_reward_model:
            extra.RewardModelCLI([verb, *args])  # whose page of help is short
        elif not help_about:
            print(short_page(verb), end="")
        elif verb == "sft":
            SFTCLI(args, help_about)
        elif verb == "doctor":
            return int(extra.DoctorCLI([verb, *args], help_about).status)
        elif verb == "fit" and any(arg.partition("=")[0] == "--branch" for arg in args):
            importlib.import_module(BRANCH).fit(args, help_about)
        else:
            GRPOCLI([verb, *args], help_about)
    except RolloutInterrupted as stop:
        by_hand = stop.signal == signal.SIGINT
        print(f"grpo-pl {verb}: stopped by {'Ctrl-C' if by_hand else 'SIGTERM'}; --resume goes on.", file=sys.stderr)
        return INTERRUPTED if by_hand else TERMINATED
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # which Lightning turns into a status of 1
            raise KeyboardInterrupt from stop
        raise
    return 0


def _command(verb: str, args: list[str]) -> int:
    with _imports_kept():
        function = getattr(importlib.import_module(module_of(verb)), verb)
    description = re.split(r"\n(?:Args|Returns|Raises):", inspect.getdoc(function) or "")[0]
    parser = Parser(prog=f"grpo-pl {verb}", description=description)
    parameters = inspect.signature(function).parameters
    settings = get_type_hints(function)["settings"] if list(parameters) == ["settings"] else None
    if settings is not None:  # a dataclass, whose fields are the options
        parser.add_class_arguments(settings, as_group=False)
        parameters = inspect.signature(settings).parameters
    else:  # not by auto_cli, which drops whatever is given for an argument named `config`
        parser.add_function_arguments(function, as_group=False, as_positional=True, sub_configs=True)
    switches = {name for name, parameter in parameters.items() if isinstance(parameter.default, bool)}
    args, config = gather(args) if "config" in parameters else (args, [])
    named = _python_names(args, switches)
    first = next(iter(parameters.values()), None)
    if first is not None and first.default is first.empty and str(first.annotation).startswith("list["):
        # `a b --output=c`: the parser takes one argument for a list, not several
        show_as(parser, first.name, "PATH ...")
        values: list[str] = []
        options: list[str] = []
        for before, arg in zip(["", *named], named, strict=False):
            is_value = before.startswith("-") and "=" not in before
            (options if arg.startswith("-") or is_value else values).append(arg)
        named = [*([json.dumps(values)] if values else []), *options]
    given = parser.instantiate(parser.parse_args(named))
    if config:
        given["config"] = config
    return int((function(**given) if settings is None else function(settings(**given))) or 0)


@contextmanager
def _imports_kept() -> Iterator[None]:
    """Switches the garbage collector off during imports, and keeps it away from what was imported: it took a sixth of a
    command's start."""
    collects, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
        if len(sys.modules) > known:
            gc.freeze()
    finally:
        if collects:
            gc.enable()


def _python_names(args: list[str], switches: set[str]) -> list[str]:
    """``--max-batch-size=8`` as ``--max_batch_size=8``, ``-n`` as ``--n`` and ``--from`` as ``--from_``: options are
    named after arguments. One of ``switches`` that is given no value is true."""
    named = []
    for arg, after in zip(args, [*args[1:], "-"], strict=False):
        flag, equals, value = arg.partition("=")
        if re.fullmatch(r"-[a-zA-Z]", flag):
            flag = "--help" if flag == "-h" else f"-{flag}"
        elif flag.startswith("--"):
            flag = "--" + flag[2:].replace("-", "_")
            flag += "_" * keyword.iskeyword(flag[2:])
        if flag[2:] in switches and not equals and after.startswith("-"):
            equals, value = "=", "true"
        named.append(flag + equals + value)
    return named


def _is_for_users(error: Exception) -> bool:
    """True for errors that users can put right: bad values and files, missing packages, errors of types that this
    package or Lightning defines, and errors in functions of the user's own, which carry a note."""
    own = type(error).__module__.split(".")[0] in ("grpo_pl", "lightning", "pytorch_lightning")
    return own or isinstance(error, ValueError | OSError | ImportError) or bool(_notes(error))


def _one_line(error: Exception) -> str:
    text = explain(str(error)) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    if notes := _notes(error):
        return f"{type(error).__name__}: {text}, {'; '.join(notes)} ({frame.f_code.co_filename}, line {line})"
    ours = frame.f_globals.get("__name__", "").split(".")[0] in ("grpo_pl", "serve")
    return text if ours else f"{text} ({DEBUG}=1 shows where from)"


def _notes(error: Exception) -> list[str]:
    return getattr(error, "__notes__", [])
