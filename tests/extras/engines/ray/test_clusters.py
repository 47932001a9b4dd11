"""Clusters that cannot be used, or end: each way in one line."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.extras.engines.ray import RayEngine
from tests.extras.engines.ray.conftest import MARKS, ROOT, STORE_BYTES, Cluster, draw
from tests.rollout.drawn import build_model

pytestmark = MARKS


def test_what_a_cluster_lacks_is_told_in_one_line(cluster: Any, connect: Any, caplog: Any) -> None:
    with pytest.raises(ValueError, match=r"5 actors of 2 CPUs and 0 GPUs are to draw, .* 3 nodes have room for 2"):
        connect(actors=5).check()
    with pytest.raises(ValueError, match=r"1 actors of 2 CPUs and 1 GPUs are to draw, .* have room for 0"):
        connect(gpus=1).check()
    big, full = build_model("qwen2"), connect()
    big.register_parameter("extra", torch.nn.Parameter(torch.zeros(STORE_BYTES // 4 + 1)))
    with pytest.raises(ValueError, match=r"do not fit into the 0\.09 GiB of this node's object store"):
        draw(full, big)
    full.close()
    draw(connect(actors=2), build_model("qwen2"))  # which takes both nodes
    with pytest.raises(ValueError, match="after 1 s an actor had not begun; free in the Ray cluster are"):
        draw(connect(start_s=1), build_model("qwen2"))


def test_addresses_that_cannot_be(connect: Any) -> None:
    from grpo_pl.extras.engines.native_child import NativeChildEngine

    for address in ("local", "ray://127.0.0.1:10001"):
        with pytest.raises(ValueError, match=f"address is '{address}': give auto or HOST:PORT of a running cluster"):
            RayEngine(engine=NativeChildEngine(), address=address)


CHECK = """
import sys
from grpo_pl.extras.engines.native_child import NativeChildEngine
from grpo_pl.extras.engines.ray import RayEngine
try:
    RayEngine(engine=NativeChildEngine(), address=sys.argv[1]).check()
except ValueError as error:
    print(error)
"""


def _told(address: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", CHECK, address]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stderr == "" and done.stdout.count("\n") == 1, done.stderr
    return done.stdout


def test_a_wrong_token_and_a_cluster_that_is_not_there_are_told_in_one_line(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("another-token-that-is-as-long-as-the-right-one")
    wrong = {**cluster.environment, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    assert "does not take this process's token: RAY_AUTH_MODE=token and" in _told(cluster.address, wrong)
    assert "no Ray cluster can be joined at 127.0.0.1:9 (" in _told("127.0.0.1:9", cluster.environment)


def _driven(cluster: Any, *arguments: object) -> list[str]:
    """Lines that a driver prints, away from this folder, whose modules Ray would give to the actors."""
    command = [sys.executable, str(ROOT / "tests/extras/engines/ray/driver.py"), cluster.address, *map(str, arguments)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 100, "cwd": "/"}
    done = subprocess.run(command, env=cluster.environment, **options)
    return [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]


@pytest.fixture
def third(cluster: Any) -> Iterator[Callable[..., None]]:
    """``third(NAME="value")``: a further node with these variables, the only one for actors of 3 CPUs."""
    nodes = len(cluster.nodes)
    yield lambda **environment: cluster.add(cpus=3, **environment)
    if len(cluster.nodes) > nodes:
        cluster.lose(whole=True)


def test_a_host_whose_node_ends_is_told_in_one_line() -> None:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        alone = Cluster(Path(folder), head_cpus=2, nodes=0)
        (line,) = _driven(alone, 2, "raylet")
        alone.end()
    assert re.fullmatch(r"this host's Ray node has ended, .*; --resume goes on\.", line), line


def test_a_node_with_another_version_is_named(cluster: Any, third: Any, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "grpo_pl", tmp_path / "grpo_pl", ignore=shutil.ignore_patterns("__pycache__"))
    init = tmp_path / "grpo_pl/__init__.py"
    text = init.read_text()
    assert '__version__ = "' in text
    init.write_text(text.replace('__version__ = "', '__version__ = "9'))
    third(PYTHONPATH=os.pathsep.join([str(tmp_path), cluster.environment["PYTHONPATH"]]))
    (line,) = _driven(cluster, 3, "none")
    assert re.search(r"^model\.engine: the node .* has .*'grpo_pl': '9.*: install the same there\.$", line), line


def test_the_memory_monitor_is_named(cluster: Any, third: Any) -> None:
    third(RAY_memory_usage_threshold="0.01", RAY_memory_monitor_refresh_ms="100")
    last, again = _driven(cluster, 3, "none")
    cause = "ended: Ray's memory monitor killed it, because its node was short of memory, whoever uses that"
    assert cause in again and again.endswith("Another draws its part of the rollout again.")
    assert cause in last and "the second in this part of a rollout" in last


def test_the_drivers_terminal_shows_our_line_alone(cluster: Any) -> None:
    lines = _driven(cluster, 2, "actor")
    assert [line for line in lines if "Another draws its part of the rollout again." in line], "\n".join(lines)
    assert len(lines) == 2 and "drawn (1, 40)" in lines, lines
