"""``grpo-pl new``: writes the folder of a task that can be trained at once."""

from __future__ import annotations

import math
from pathlib import Path


def new(
    name: str,
    from_: str = "reward",
    question: str | None = None,
    answer: str | None = None,
    policy: str | None = None,
    lora: bool | None = None,
    minutes: float | None = None,
) -> None:
    """Writes a folder with a task of your own: its source of problems, reward, configuration and tests.

    `pytest NAME` and `grpo-pl fit --config NAME/config.yaml` work at once. Nothing is ever overwritten.

    Args:
        name: the folder to write; its last part is the name of the task.
        from_: what to make the task of: the rows of a file (csv:FILE or jsonl:FILE), a reward function (reward: an
            example to change) or an environment (gymnasium:ID).
        question: column of a file that holds the questions; by default one with a usual name.
        answer: column of a file that holds the gold answers; likewise.
        policy: a pretrained model, by hub name, folder or GGUF file; or scratch, a tiny policy that knows nothing yet.
            By default what the command advises: SmolLM2-135M-Instruct, for an environment without a GPU scratch.
        lora: train adapters of the pretrained model, or all of its weights (false); by default adapters from a billion
            parameters on.
        minutes: the run of a tiny policy takes about so long on this machine (by default 6); its speed is measured for
            some seconds.
    """
    from grpo_pl.extras.scaffold.advice import SCRATCH, advised_policy
    from grpo_pl.extras.scaffold.kinds import draft, kind_of
    from grpo_pl.extras.scaffold.writing import check_folder, write_task
    from grpo_pl.policy.quiet import quiet_libraries

    kind, rest = kind_of(from_)
    advised, why = advised_policy(kind)
    chosen = policy or advised
    if minutes is not None and not (math.isfinite(minutes) and minutes > 0):
        raise ValueError(f"--minutes must be a number above 0, got {minutes:g}.")
    if lora is not None and chosen == SCRATCH:
        raise ValueError("--lora is about a pretrained model: name it by --policy.")
    if minutes is not None and chosen != SCRATCH:
        raise ValueError("--minutes is about a tiny policy (--policy scratch); of another, set data.steps.")
    quiet_libraries()
    folder = Path(name)
    check_folder(folder)
    print(why)
    drafted = draft(kind, rest, question, answer, small_policy=chosen == SCRATCH)
    print(f"policy: {'a tiny one from scratch' if chosen == SCRATCH else chosen}")
    write_task(drafted, folder, None if chosen == SCRATCH else chosen, lora=lora, minutes=minutes or 6.0)
    print(f"{folder} is written. Next:\n  pytest {folder}\n  grpo-pl fit --config {folder / 'config.yaml'}")
