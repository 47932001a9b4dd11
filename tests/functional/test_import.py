"""The pure core needs torch alone."""

import subprocess
import sys


def test_importing_functional_does_not_import_lightning_transformers_or_litserve() -> None:
    modules = "advantages, kl, losses, logprobs, sampling"
    code = (
        f"import sys; from grpo_pl.functional import {modules}; "
        "print([m for m in ('lightning', 'transformers', 'litserve') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
