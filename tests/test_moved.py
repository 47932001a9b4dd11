"""Names of 0.3: every module and class is found where it is now, in 0.4 with one line, in 0.5 no more."""

import importlib
import pickle
import subprocess
import sys
from typing import Any

import pytest

import grpo_pl
from grpo_pl import moved
from grpo_pl.config.jsonargparse_adapter import with_current_classes


@pytest.fixture(autouse=True)
def _nothing_told_yet() -> None:
    moved._tell.cache_clear()


@pytest.mark.parametrize("old", moved.MODULES)
def test_a_module_is_imported_by_its_old_name(old: str) -> None:
    now = moved.MODULES[old]
    assert importlib.import_module(old) is importlib.import_module(now)
    assert moved.current_name(now) == now  # one step leads to it


def test_an_old_name_inside_a_folder_that_moved_is_the_new_one() -> None:
    path = "grpo_pl.tools.doctor.callback"
    assert moved.current_name(f"{path}.Doctor") == "grpo_pl.extras.doctor.callback.Doctor"
    assert importlib.import_module(path) is importlib.import_module("grpo_pl.extras.doctor.callback")


def test_names_that_have_not_moved_are_as_they_were() -> None:
    for name in ("grpo_pl.rewards.MathReward", "torch.optim.AdamW", "grpo_pl.tools_of_mine.X", "grpo_pl.nothing"):
        assert moved.current_name(name) == name
    with pytest.raises(ModuleNotFoundError, match=r"grpo_pl\.nothing"):
        importlib.import_module("grpo_pl.nothing")


def test_a_pickle_of_an_old_name_is_of_the_class_now() -> None:
    from grpo_pl.extras.watch.callback import RewardWatch

    assert pickle.loads(b"cgrpo_pl.tools.watch\nRewardWatch\n.") is RewardWatch


def test_a_configuration_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"callbacks": [{"class_path": "grpo_pl.tools.live.LiveView"}] * 2, "text": "grpo_pl is a word"}
    new = {"class_path": "grpo_pl.extras.live.callback.LiveView"}
    assert with_current_classes(tree) == {**tree, "callbacks": [new] * 2}
    (line,) = capsys.readouterr().err.splitlines()
    assert "grpo_pl.tools.live.LiveView" in line and new["class_path"] in line


def test_the_next_version_refuses_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_pl, "__version__", "0.5.0")
    with pytest.raises(
        ImportError, match=r"^grpo_pl\.tools\.live\.LiveView is grpo_pl\.extras\.live\.callback\.LiveView"
    ):
        with_current_classes({"class_path": "grpo_pl.tools.live.LiveView"})
    code = "import grpo_pl; grpo_pl.__version__ = '0.5.0'; import grpo_pl.tools.watch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "grpo_pl.tools.watch is grpo_pl.extras.watch.callback now." in done.stderr.splitlines()[-1]


def test_old_and_new_names_compare_as_equal() -> None:
    names: dict[str, Any] = {
        "grpo_pl.tools.watch.RewardWatch": "grpo_pl.RewardWatch",
        "grpo_pl.callbacks.results.WriteReport": "grpo_pl.WriteReport",
    }
    for old, new in names.items():
        assert moved.defined_name(old) == moved.defined_name(new) != old
