"""``grpo-pl compare``: two presets on the tiny task, and what it refuses before anything is trained."""

import csv
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from grpo_pl.cli.main import main
from grpo_pl.extras.compare import command as compare_module
from grpo_pl.extras.compare.command import compare, find_presets
from tests.forked import Forked

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def _forked(command: Sequence[str], *, check: bool) -> Any:
    """In the place of `subprocess.run`, for ``python -m grpo_pl fit …``."""
    assert command[1:4] == ["-m", "grpo_pl", "fit"]
    return SimpleNamespace(returncode=Forked(partial(main, command[3:]), env=os.environ, output=None).wait())


@pytest.fixture(scope="module", autouse=True)
def forked_runs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "subprocess", SimpleNamespace(run=_forked))
        yield


@pytest.fixture(scope="module")
def compared(command_line: Any) -> tuple[Any, Path]:
    config = command_line.config("compared")
    outcome = command_line("compare", f"--config={config}", "--algorithms=grpo,dr_grpo", "--steps=3", "--seed=2")
    return outcome, command_line.runs / "compare"


def test_each_preset_is_a_run_of_its_own(compared: tuple[Any, Path]) -> None:
    outcome, folder = compared
    assert outcome.status == 0, outcome.err
    for preset, scale in (("grpo", "group_std"), ("dr_grpo", "none")):
        assert (folder / preset / "export" / "model.safetensors").is_file()
        config = (folder / preset / "config.yaml").read_text()
        assert f"scale: {scale}" in config
        assert "hidden_size: 32" in config  # the configuration that was given, not the default one
    for word in ("dr_grpo", "reward", "entropy", str(folder / "compare.csv"), str(folder / "compare.png")):
        assert word in outcome.out


def test_curves_begin_alike_and_part_afterwards(compared: tuple[Any, Path]) -> None:
    _, folder = compared
    with (folder / "compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["algorithm"] for row in rows] == ["grpo"] * 3 + ["dr_grpo"] * 3
    grpo, dr_grpo = rows[:3], rows[3:]
    same = ("rollout", "reward", "length_correct", "length_wrong", "entropy")  # one policy, one seed, no update yet
    assert [grpo[0][name] for name in same] == [dr_grpo[0][name] for name in same]
    assert [row["entropy"] for row in grpo[1:]] != [row["entropy"] for row in dr_grpo[1:]]
    assert all(row["kl"] != "" for row in grpo)
    assert all(row["kl"] == "" for row in dr_grpo)  # it has no reference


def test_the_plot_is_a_picture(compared: tuple[Any, Path]) -> None:
    from matplotlib.image import imread

    _, folder = compared
    pixels = imread(folder / "compare.png")
    assert pixels.shape[:2] == (840, 1200)
    assert pixels.std() > 0.02  # not blank


@pytest.mark.slow
def test_an_engine_records_what_each_preset_asks_for(fresh_command_line: Any) -> None:
    preset = fresh_command_line.folder / "dppo_top.yaml"
    term = {"class_path": "grpo_pl.objective.terms.top_k_trust_region.TopKTrustRegion", "init_args": {"top_k": 3}}
    bounds = {"epsilon_low": 0.05, "epsilon_high": 0.05}
    objective = {"surrogate": "dppo_kl", **bounds, "terms": {"trust_region": term}}
    preset.write_text(yaml.safe_dump({"model": {"algorithm": objective}}))
    config = fresh_command_line.config("compared")
    outcome = fresh_command_line("compare", f"--config={config}", f"--algorithms=dppo,{preset}", "--steps=2")
    assert outcome.status == 0, outcome.err
    for name, recorded in (("dppo", False), ("dppo_top", True)):
        folder = fresh_command_line.runs / "compare" / name
        assert ("top_k: 3" in (folder / "config.yaml").read_text()) == recorded
        assert (folder / "export" / "model.safetensors").is_file()


def test_a_fit_that_fails_is_named_and_the_status_is_1(
    fresh_command_line: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = fresh_command_line.folder / "broken.yaml"
    broken.write_text("model:\n  algorithm:\n    epsilon_low: -1.0\n")
    config = fresh_command_line.config()
    outcome = fresh_command_line("compare", f"--config={config}", f"--algorithms={broken}", "--steps=1")
    assert outcome.status == 1
    assert "broken failed; the reason stands above" in outcome.err
    assert "epsilon" in capfd.readouterr().err
    assert not (fresh_command_line.runs / "compare" / "compare.csv").exists()


def test_presets_are_found_beside_the_configuration_first(tmp_path: Path) -> None:
    (tmp_path / "algorithm").mkdir()
    own = tmp_path / "algorithm" / "grpo.yaml"
    own.touch()
    other = tmp_path / "other.yaml"
    other.touch()
    found = find_presets(f"grpo, rloo,{other}", tmp_path / "task.yaml")
    assert found == {"grpo": own, "rloo": CONFIGS / "algorithm" / "rloo.yaml", "other": other}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"algorithms": "grpo,drgrpo"}, r"no preset 'drgrpo'. There are: chord, cispo, clip_cov, dapo"),
        ({"algorithms": "grpo,grpo"}, "'grpo' twice"),
        ({"algorithms": " ,"}, "empty"),
        ({"algorithms": "missing.yaml"}, r"no preset 'missing.yaml'"),
        (
            {"config": [str(CONFIGS / "quickstart.yaml"), "--model.algorithm.preset=dapo"]},
            "model.algorithm.preset would take the place of every preset of --algorithms: name it there only",
        ),
        ({"overlay": str(CONFIGS / "algorithm" / "dapo.yaml")}, "would take the place of every preset"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"overlay": "missing.yaml"}, "no such file: missing.yaml"),
        ({"config": "missing.yaml"}, "no such file: missing.yaml"),
    ],
)
def test_mistakes_are_refused_before_the_first_fit(tmp_path: Path, arguments: dict[str, Any], complaint: str) -> None:
    given: dict[str, Any] = {"config": str(CONFIGS / "quickstart.yaml"), "runs_dir": str(tmp_path), **arguments}
    with pytest.raises(ValueError, match=complaint):
        compare(**given)
    assert not any(tmp_path.iterdir())
