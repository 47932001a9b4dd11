"""``grpo-pl verify``: whether an export is what its run trained, as a table, or as JSON for programs."""

from __future__ import annotations

import json as json_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_pl.cli.commands import check_at_least
from grpo_pl.extras.replay.recorded import CannotReplay

MARKS = {True: "holds", False: "FAILS", None: "not checked"}


def verify(
    path: Path, run: Path | None = None, samples: int = 20, run_rewards: bool = False, json: bool = False
) -> int:
    """Proves an export: recorded completions are drawn and scored again, an update behind a checkpoint is repeated, and
    digests are compared.

    The exit status is 0 only if everything holds, 1 if not, and 2 where there is nothing to compare. What was found is
    written to verified.json in the export's folder; the run is never changed.

    Args:
        path: an exported folder, with its run as --run; or a run alone, whose export is held to it.
        run: the folder of the export's run, or its name under runs.
        samples: recorded completions to draw again at least, from the rollouts behind the newest checkpoints.
        run_rewards: run rewards, judges, agents and environments of your own again, which may cost money.
        json: print the result as JSON.
    """
    from grpo_pl.extras.replay.proof import prove

    check_at_least(1, samples=samples)
    try:
        proof = prove(path, run, samples=samples, run_rewards=run_rewards)
    except OSError as error:
        raise CannotReplay(f"{error.filename or path}: {error.strerror or error}") from error
    if json:
        print(json_module.dumps(proof.as_json()))
        return int(not proof.proved)
    table = Table("compared", "", "")
    for check in proof.checks:
        table.add_row(check.what, MARKS[check.held], check.told)
    console = Console()
    console.print(table, highlight=False)
    wrong = next((check for check in proof.checks if check.held is False), None)
    open_ = next((check for check in proof.checks if check.held is None), None)
    name = str(proof.export or proof.run)
    if proof.proved:
        console.print(f"proved: {name} is what {proof.run} trained.", highlight=False, soft_wrap=True)
    elif wrong is not None:
        console.print(f"not proved: {wrong.what}: {wrong.told}.", highlight=False, soft_wrap=True)
    elif open_ is not None:
        console.print(f"not proved: {open_.told.removeprefix('not proved: ')}.", highlight=False, soft_wrap=True)
    return int(not proof.proved)
