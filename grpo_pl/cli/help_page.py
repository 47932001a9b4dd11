"""The help page of ``fit``, ``validate`` and ``doctor``: one screen, a part, or everything."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from grpo_pl.config.suggestions import nearest

USAGE = "grpo-pl {verb} --config FILE [--config OVERLAY …] [--OPTION VALUE …]"
ALL = "all"
SHORT: dict[str, str] = {
    "config": "YAML file; later ones win",
    "name": "of the run; else the file's",
    "resume": "go on with the newest run of that name",
    "ckpt_path": "checkpoint to begin with",
    "output": "JSON file for the metrics",
    "rollouts": "rollouts that are looked at",
    "seconds": "most seconds for them",
    "json": "print findings and figures as JSON",
    "seed_everything": "names every sample",
    "model.policy.path": "model of the hub, folder or GGUF file",
    "model.policy.from_scratch": "config of a new model instead",
    "model.rewards": "class_path and init_args of each",
    "model.template.user": "what is put around the question",
    "model.environment": "what the policy acts in",
    "model.cold_start": "demonstrations before RL",
    "model.algorithm.group_size": "completions of a prompt",
    "model.algorithm.beta": "weight of the KL term",
    "model.sampling.max_completion_length": "tokens of a completion",
    "model.sampling.temperature": "of training completions",
    "model.optimization.lr": "peak learning rate",
    "data.source": "class_path and init_args",
    "data.steps": "rollouts of the run",
    "data.prompts_per_step": "prompts of a rollout",
    "data.val_prompts": "held-out problems; null: all",
    "trainer.devices": "processes",
    "trainer.val_check_interval": "rollouts between validations",
}
"""Options of the short page, where the verb has them, and their purpose."""


def stored_page(verb: str) -> str | None:
    """The short page of a verb, which the parser needs seconds for; None for verbs that have their own.

    ``grpo-pl VERB --seed_everything=0 --help`` is what the parser makes of it.
    """
    file = Path(__file__).with_name("help") / f"{verb}.txt"
    return file.read_text(encoding="utf-8") if file.is_file() else None


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
    return list(args), ALL


def short_page(usage: str, description: str, defaults: Mapping[str, object]) -> str:
    """The options that most runs set, a line each: it fits into a window of 40 lines of 80 characters.

    Args:
        defaults: the default of every option that the verb has, by name.
    """
    lines = []
    for name, text in SHORT.items():
        if name in defaults:
            default = defaults[name]
            number = isinstance(default, int | float) and not isinstance(default, bool)
            lines.append(f"  --{name:<38}{text}{f' ({default})' if number else ''}")
    command = " ".join(usage.split()[:2])
    return "\n".join(
        [
            *textwrap.wrap(f"usage: {usage}", 80, subsequent_indent="  "),
            "",
            *textwrap.wrap(description, 80),
            "",
            *lines,
            "",
            f"Each is YAML, too. Every option:         {command} --help all",
            f"Those of a part:                         {command} --help model.sampling",
            "",
        ]
    )


def check_part(part: str, names: Collection[str]) -> None:
    """Refuses a part that no option is in."""
    if not any(is_in(name, part) for name in names):
        raise ValueError(f"--help: no option begins with {part!r}{nearest(part, names)}; --help all shows every one.")


def is_in(name: str, part: str) -> bool:
    """True if an option is in a part, as ``model.sampling.stop`` is in ``model.sampling``."""
    return f"{name}.".startswith(f"{part}.")
