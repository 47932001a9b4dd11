"""``grpo-pl new``: writes the folder of a task that can be trained at once."""

from __future__ import annotations

import math
from pathlib import Path


def new(
    name: str,
    from_: str | None = None,
    question: str | None = None,
    answer: str | None = None,
    policy: str | None = None,
    lora: bool | None = None,
    minutes: float = 6.0,
) -> None:
    """Writes a folder with a task of your own: its source of problems, reward, configuration and tests.

    `pytest NAME` and `grpo-pl fit --config NAME/config.yaml` work at once. Nothing is ever overwritten.

    Args:
        name: the folder to write; its last part is the name of the task.
        from_: what to make the task of: csv:FILE, jsonl:FILE, reasoning_gym:TASK or gymnasium:ID; an example of its own
            by default.
        question: column of a file that holds the questions; by default one with a usual name.
        answer: column of a file that holds the gold answers; likewise.
        policy: a pretrained model for config.yaml, by hub name, folder or GGUF file; by default a small one from
            nothing.
        lora: train adapters of the pretrained model, or all of its weights (false); by default adapters from a billion
            parameters on.
        minutes: the run of a small policy from nothing takes about so long on this machine; its speed is measured for
            some seconds.
    """
    from grpo_pl.extras.scaffold.kinds import draft
    from grpo_pl.extras.scaffold.writing import check_folder, write_task
    from grpo_pl.policy.quiet import quiet_libraries

    if not (math.isfinite(minutes) and minutes > 0):
        raise ValueError(f"--minutes must be a number above 0, got {minutes:g}.")
    if lora is not None and policy is None:
        raise ValueError("--lora is about a pretrained model: name it by --policy.")
    quiet_libraries()
    folder = Path(name)
    check_folder(folder)
    drafted = draft(from_, question, answer, small_policy=policy is None)
    write_task(drafted, folder, policy, lora=lora, minutes=minutes)
    print(f"{folder} is written. Next:\n  pytest {folder}\n  grpo-pl fit --config {folder / 'config.yaml'}")
