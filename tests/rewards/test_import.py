import subprocess
import sys


def test_importing_the_rewards_does_not_import_torch_or_sympy() -> None:
    heavy = "torch", "sympy", "transformers", "lightning", "openai"
    code = f"import sys, grpo_pl.rewards; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
