"""One of the processes of a replay, which torchrun starts: see `forward.run_forward_in_children`."""

import json
import os
import sys
from pathlib import Path

from grpo_pl.extras.replay.asked import Asked, Curve
from grpo_pl.extras.replay.forward import run_forward
from grpo_pl.extras.replay.recorded import CannotReplay, RecordedRun


def main(given: str) -> int:
    """Plays forward as the JSON of ``given`` says: run, checkpoint, step, folder, other settings, and whose answer to
    score, if any."""
    run, checkpoint, step, folder, changes, asked = json.loads(given)
    callbacks = [] if asked is None else [Curve(Asked(**asked), Path(folder))]
    try:
        run_forward(RecordedRun.open(run), checkpoint and Path(checkpoint), step, Path(folder), changes, callbacks)
    except CannotReplay as error:
        Path(folder, f"failed-{os.environ['RANK']}").write_text(str(error), encoding="utf-8")
        return 1
    return 0


sys.exit(main(sys.argv[1]))
