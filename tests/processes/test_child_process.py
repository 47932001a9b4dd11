"""A child process is started, asked, limited and described, and never outlives the one that started it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from grpo_pl.processes import child_process
from grpo_pl.processes.child_process import ChildProcess, ChildStartError, exit_name
from grpo_pl.processes.variables import MODEL, clean_environment
from grpo_pl.rollout.native.decoder_choice import SWITCH
from tests.process_list import gone, lives

PLUGINS = Path(__file__).parents[1] / "plugins"
ENVIRONMENT = clean_environment() | {"PYTHONPATH": str(PLUGINS)}


def _start(name: str, *arguments: str, **options: object) -> ChildProcess:
    return ChildProcess(f"child_functions:{name}", *arguments, environment=ENVIRONMENT, **options)  # type: ignore[arg-type]


def test_a_function_gets_channel_parent_and_arguments() -> None:
    child = _start("echo", "a", "b")
    assert child.channel.receive(60.0).decode() == f"{os.getpid()} a b"
    child.channel.send(b"x" * 10**7)
    assert child.channel.receive(60.0) == b"x" * 10**7
    child.close()
    assert child.closed and gone(child.pid)


def test_a_child_has_the_variables_that_it_is_given_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    child = ChildProcess("child_functions:variables", environment=ENVIRONMENT)
    names = set(child.channel.receive(60.0).decode().split())
    child.close()
    assert "HF_TOKEN" not in names and "PATH" in names
    assert names <= {*clean_environment(), "PYTHONPATH", "LC_CTYPE"}


def test_a_process_with_a_model_has_the_switch_of_the_decode_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "torch")
    assert clean_environment(MODEL)[SWITCH] == "torch" and SWITCH not in clean_environment()


def test_a_child_finds_the_package_of_its_parent_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grpo_pl.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    child = ChildProcess("child_functions:path", environment={**ENVIRONMENT, "PYTHONPATH": f"{PLUGINS}:{tmp_path}"})
    package, *path = child.channel.receive(60.0).decode().splitlines()
    child.close()
    import grpo_pl

    assert package == grpo_pl.__file__
    assert not {str(Path(grpo_pl.__file__).parent), str(Path(grpo_pl.__file__).parent / "processes"), ""} & set(path)


def test_a_channel_that_closes_ends_a_child_that_waits() -> None:
    child = _start("echo")
    child.channel.close()
    assert child.exit_status(within_s=60.0) == 0


def test_a_child_that_does_not_end_by_itself_is_killed() -> None:
    child = _start("sleep")
    child.channel.receive(60.0)
    child.channel.close()
    assert child.exit_status(within_s=0.1) == -signal.SIGKILL


def test_patience_lets_a_child_end_by_itself(tmp_path: Path) -> None:
    for patience_s, left in ((60.0, True), (0.0, False)):
        file = tmp_path / f"{patience_s}"
        child = _start("write_at_the_end", str(file), patience_s=patience_s)
        child.channel.receive(60.0)
        child.close()
        assert file.exists() == left


def test_a_death_is_told_with_its_signal_and_the_last_lines() -> None:
    child = _start("print_and_die", "6", keep_output=True)
    with pytest.raises(EOFError):
        child.channel.receive(60.0)
    assert child.death() == "ended by SIGABRT; its last lines:" + "".join(f"\n  line {i}" for i in range(8, 20))
    child.close()
    quiet = _start("print_and_die", "9")
    with pytest.raises(EOFError):
        quiet.channel.receive(60.0)
    assert quiet.death() == "ended by SIGKILL"


@pytest.mark.parametrize(("status", "name"), [(3, "exit status 3"), (-9, "SIGKILL"), (-40, "signal 40")])
def test_how_an_exit_status_is_called(status: int, name: str) -> None:
    assert exit_name(status) == name


def test_a_dropped_child_ends() -> None:
    child = _start("sleep")
    child.channel.receive(60.0)
    pid = child.pid
    del child
    assert gone(pid)


def test_what_a_child_has_started_ends_with_it() -> None:
    for end in (ChildProcess.kill, ChildProcess.close, lambda child: child.exit_status(within_s=0.0)):
        child = _start("sleep_with_a_program")
        program = int(child.channel.receive(60.0))
        assert lives(program)
        end(child)
        assert gone(program)
        child.close()


def test_what_a_child_has_started_ends_also_when_it_has_ended_by_itself() -> None:
    child = _start("die_with_a_program")
    program = int(child.channel.receive(60.0))
    while child.is_alive:
        time.sleep(0.01)
    assert child.exit_status(within_s=60.0) == 3
    assert gone(program)
    child.close()


def test_a_child_says_whether_it_is_ready() -> None:
    for answer in ("", "no such model: naïve"):
        child = _start("refuse")
        assert child.start(answer.encode()) == answer
        child.close()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("deaf", "did not start within 0.5 s"),
        ("print_and_die", "ended at start with SIGABRT"),
        ("endless", "answered 4611686018427387904 bytes at start"),
    ],
)
def test_a_child_that_does_not_begin_is_killed(function: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if function == "deaf":
        monkeypatch.setattr(child_process, "START_LIMIT_S", 0.5)
    child = _start(function, *(["6"] if function == "print_and_die" else []), patience_s=300.0)
    with pytest.raises(ChildStartError, match=f"^{says}$"):
        # one that does not read: more than the kernel takes
        child.start(bytes(1 << 21) if function == "deaf" else b"")
    assert child.closed and gone(child.pid)


def test_an_error_of_the_function_that_is_not_the_channels_end_is_told() -> None:
    child = _start("fail_on_a_file", keep_output=True)
    assert "ended by exit status 1" in (told := child.death(within_s=60.0)) and "EOFError: the file is cut off" in told
    child.close()


def test_a_child_is_told_to_end_also_while_another_process_holds_the_channel_open(tmp_path: Path) -> None:
    child = _start("write_at_the_end", str(tmp_path / "file"), patience_s=300.0)
    child.channel.receive(60.0)
    holder = os.fork()
    if holder == 0:
        time.sleep(120)
        os._exit(0)
    began = time.monotonic()
    child.close()
    assert time.monotonic() - began < 60.0
    assert (tmp_path / "file").exists()
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)


PARENT = """
import os, sys, time
from grpo_pl.processes.child_process import ChildProcess

child = ChildProcess(sys.argv[1], environment=dict(os.environ))
if sys.argv[1] == "child_functions:sleep":
    child.channel.receive()
holder = os.fork()  # holds the other end of the channel open
if holder == 0:
    os.setsid()  # leaves the group
    print(child.pid, os.getpid(), flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize(
    ("function", "number"),
    [("child_functions:sleep", signal.SIGTERM), ("child_that_imports_for_ever:main", signal.SIGKILL)],
)
def test_a_busy_child_ends_with_its_parent_also_while_others_hold_the_channel_open(
    function: str, number: signal.Signals
) -> None:
    """A signal to the parent's group, which the child is no member of."""
    path = os.pathsep.join([str(PLUGINS), *filter(None, sys.path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), function],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    child, holder = map(int, parent.stdout.readline().split())
    os.killpg(parent.pid, number)
    parent.wait()
    parent.stdout.close()
    assert gone(child)
    assert lives(holder)
    os.kill(holder, signal.SIGKILL)


def test_a_forked_copy_closes_its_channel_only() -> None:
    child = _start("echo")
    child.channel.receive(60.0)
    copy = os.fork()
    if copy == 0:
        child.close()
        os._exit(0)
    os.waitpid(copy, 0)
    child.channel.send(b"still there")
    assert child.channel.receive(60.0) == b"still there"
    child.close()
