"""A package of an extra that is not installed ends the command in one line with the pip command that brings it."""

import sys
from pathlib import Path

import pytest

from grpo_pl.cli.main import main
from tests.forked import forked

CONFIGS = Path(__file__).parents[1] / "configs"
QUICKSTART = f"--config={CONFIGS / 'quickstart.yaml'}"


@pytest.mark.parametrize(
    ("extra", "package", "arguments"),
    [
        ("environments", "gymnasium", ["new", "world", "--from=gymnasium:CartPole-v1"]),
        ("environments", "textarena", ["fit", f"--config={CONFIGS / 'guess_number.yaml'}"]),
        pytest.param(
            *("gsm", "multilingual_gsm_symbolic", ["fit", f"--config={CONFIGS / 'gsm_symbolic.yaml'}"]),
            marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="which that package needs"),
        ),
        ("gguf", "gguf", ["new", "sums", "--policy=model.gguf"]),
        ("judge", "openai", ["fit", QUICKSTART, "--config=judged.yaml"]),
        ("lora", "peft", ["fit", QUICKSTART, "--model.policy.lora.rank=4"]),
        ("ray", "ray", ["fit", QUICKSTART, f"--config={CONFIGS / 'engine' / 'ray.yaml'}"]),
        ("reasoning-gym", "reasoning_gym", ["fit", f"--config={CONFIGS / 'reasoning_gym_mixture.yaml'}"]),
        ("vllm", "vllm", ["fit", QUICKSTART, f"--config={CONFIGS / 'engine' / 'vllm.yaml'}"]),
    ],
)
def test_a_missing_extra_ends_in_one_line_with_the_pip_command(
    extra: str, package: str, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    judge = "{class_path: grpo_pl.rewards.JudgeReward, init_args: {model: some, base_url: http://localhost:1/v1}}"
    (tmp_path / "judged.yaml").write_text(f"model: {{rewards+: [{judge}]}}")

    def without_it() -> int:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        sys.modules[package] = None  # type: ignore[assignment]  # where the import stops
        return main(arguments)

    process, output = forked(without_it, cwd=tmp_path)
    with output:
        said = output.read()
    assert process.wait() in (1, 2), said
    assert "Traceback" not in said
    assert [f"pip install 'grpo_pl[{extra}]'" in line for line in said.splitlines()].count(True) == 1, said
