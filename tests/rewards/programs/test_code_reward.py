"""Programs run against tests: what is right earns 1; what cheats, hangs or attacks earns 0, and leaves nothing."""

import json
import os
import pickle
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from grpo_pl.rewards import CodeReward, Score
from grpo_pl.rewards.base import MissingColumn
from grpo_pl.rewards.programs import code_reward
from grpo_pl.rewards.sandbox import pool as pool_module

from .hostile import HOSTILE, KILLS_ALL, SECRET

FENCE = "```"
SANDBOX = Path(pool_module.__file__).parent
ADD = json.dumps({"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]})
SQUARE = json.dumps(["assert square(3) == 9", "assert square(-2) == 4"])


def fenced(program: str) -> str:
    return f"This solves it:\n{FENCE}python\n{program}\n{FENCE}"


def scores(reward: CodeReward, program: str | Sequence[str], tests: str) -> list[Score]:
    programs = [program] if isinstance(program, str) else program
    return reward([fenced(text) for text in programs], [tests] * len(programs), {})


def can_be_had(level: str) -> bool:
    """Whether other tools say that this machine has what a wall is made of."""
    if platform.machine() not in ("x86_64", "aarch64") or not Path("/proc/self/status").exists():
        return False
    if level == "filter":
        return "Seccomp_filters:" in Path("/proc/self/status").read_text()
    flags = ["--mount", "--net", "--ipc", "--uts", "--pid", "--fork", *([] if os.geteuid() == 0 else ["--user"])]
    tool = shutil.which("unshare")
    mounted = ["mount", "-t", "tmpfs", "none", "/tmp"]
    return tool is not None and subprocess.run([tool, *flags, *mounted], capture_output=True).returncode == 0


@pytest.fixture(scope="module", params=["namespaces", "filter"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each wall that can be put up here, by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(code_reward.LEVELS, "required", [request.param])
        reward = CodeReward()
        try:
            assert reward.level == request.param
        except ValueError as refusal:
            assert not can_be_had(request.param), refusal
            pytest.skip(str(refusal))
        yield request.param
        reward.close()


@pytest.fixture(scope="module")
def reward(level: str) -> CodeReward:
    return CodeReward()


# --- what is right ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", ADD),
        ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", ADD),
        ("def main():\n    print(eval('+'.join(input().split())))\nif __name__ == '__main__': main()", ADD),
        ("import atexit, io, sys\nout = io.StringIO()\natexit.register(lambda: sys.__stdout__.write(out.getvalue()))\n"
         "out.write(str(sum(map(int, input().split()))))", ADD),
        ("import threading\ndef g(): print(sum(map(int, input().split())))\nthreading.Thread(target=g).start()", ADD),
        ("from decimal import Decimal\nfrom fractions import Fraction\nimport heapq, re, string, zlib, typing\n"
         "print(sum(map(int, input().split())))", ADD),
        ("square = lambda x: x * x", SQUARE),
        ("def square(x):\n    print('so', x)\n    return pow(x, 2)", SQUARE),
        ("class Solution:\n    def both(self, a: List[int], b: Optional[int] = None): return (a, b)",
         json.dumps({"fn_name": "both", "inputs": ["[1]\n2"], "outputs": ["[[1], 2]"]})),
        ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\ndef f(x): return dataclasses.asdict(P(x))",
         "assert f(3) == {'x': 3}"),
        ("def f(x): return {(1, 2): {3}}, 0.1 + 0.2", "assert f(0)[0] == {(1, 2): {3}}\nassert f(0)[1] != 0.3"),
    ],
)  # fmt: skip
def test_right_programs_earn_1_behind_each_wall(reward: CodeReward, program: str, tests: str) -> None:
    (score,) = scores(reward, program, tests)
    assert (score.value, score.status) == (1.0, "ok"), score


def test_a_folder_to_write_to_and_the_whole_library_are_there_behind_namespaces(level: str, reward: CodeReward) -> None:
    program = (
        "import asyncio, sqlite3, xml.dom\nwith open('notes', 'w') as f: f.write(input())\n"
        "async def main(): print(sum(map(int, open('notes').read().split())))\nasyncio.run(main())"
    )
    (score,) = scores(reward, program, ADD)
    assert score.value == (1.0 if level == "namespaces" else 0.0)


@pytest.mark.parametrize(
    ("program", "status", "detail"),
    [
        ("print(3)", "wrong", "1 of 2; test 2: printed '3\\n'"),
        ("print(4)", "wrong", "0 of 2; test 1: printed '4\\n'"),
        ("print(3", "wrong", "SyntaxError: '(' was never closed"),
        ("print(1 / 0)", "wrong", "ZeroDivisionError: division by zero"),
        ("print(3); raise SystemExit(7)", "wrong", "ended with 7"),
        ("import ctypes\nctypes.string_at(0)", "crashed", "ended with -11"),
        ("while True: print('x' * 10000)", "too_long", "too much output"),
        ("", "no_answer", ""),
        ("#" * 50_001, "too_long", "characters"),
    ],
)
def test_what_became_of_a_program_is_its_status(reward: CodeReward, program: str, status: str, detail: str) -> None:
    (score,) = scores(reward, program, ADD)
    assert (score.value, score.status) == (0.0, status), score
    assert detail in score.detail


def test_partial_credit_is_the_share_of_the_tests(reward: CodeReward) -> None:
    share = CodeReward(partial=True)
    assert [s.value for s in scores(share, ["print(3)", "print(input())"], ADD)] == [0.5, 0.0]
    (half,) = scores(share, "square = lambda x: 9 if x > 0 else 1 / 0", SQUARE)
    assert (half.value, half.status) == (0.5, "wrong")
    (ended,) = scores(share, "def square(x):\n    if x > 0: return 9\n    import os; os._exit(0)", SQUARE)
    assert ended.value == 0.5
    assert scores(share, "print(sum(map(int, input().split())))", ADD)[0].value == 1.0


def test_time_out_is_a_status_of_its_own_and_costs_one_input(reward: CodeReward) -> None:
    short = CodeReward(time_limit_s=0.3, partial=True)
    many = json.dumps({"inputs": ["1"] * 200, "outputs": ["1"] * 200})
    started = time.monotonic()
    (score,) = scores(short, "while True: pass", many)
    assert (score.value, score.status) == (0.0, "timeout")
    assert time.monotonic() - started < 200 * 0.3  # not one after another: it would have taken a minute of CPU time


def test_tests_may_stand_in_a_column_of_any_plain_type(reward: CodeReward) -> None:
    columned = CodeReward(tests="test_list")
    program = fenced("def square(x): return x * x")
    found = columned([program] * 2, ["", "7"], {"test_list": [["assert square(3) == 9"], SQUARE]})
    assert [score.value for score in found] == [1.0, 1.0]
    assert columned.gold_faults(["", "no tests"]) == ["", ""]
    with pytest.raises(MissingColumn, match="'test_list'"):
        columned([program], [SQUARE], {})


def test_gold_answers_that_hold_no_tests_are_no_fault_of_the_program(reward: CodeReward) -> None:
    (score,) = scores(reward, "print(3)", "42")
    assert (score.value, score.status) == (None, "bad_gold")
    assert reward.gold_faults([ADD, "assert 1 == 1"]) == ["", "'1 == 1' asks the program for nothing"]


def test_the_same_program_has_the_same_reward(reward: CodeReward) -> None:
    program = "import random\ndef f(x): return [random.random(), hash('a'), list({'a', 'b', 'c'})]"
    details = {scores(reward, program + f"\n# {i}", "assert f(1) == 5")[0].detail for i in range(3)}
    assert len(details) == 1


def test_a_reward_can_be_pickled_and_used_again_after_its_end(reward: CodeReward) -> None:
    other = CodeReward(workers=1)
    again = pickle.loads(pickle.dumps(other))
    assert scores(again, "square = lambda x: x * x", SQUARE)[0].value == 1.0
    again.close()
    assert scores(again, "square = lambda x: x * x", SQUARE)[0].value == 1.0
    again.close()


# --- what is hostile --------------------------------------------------------------------------------------------------


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the host that everybody may write to, with the expected output in it; also in the environment."""
    folder = Path(tempfile.mkdtemp(prefix="place"))
    (folder / "secret").write_text(SECRET)
    folder.chmod(0o777)
    (folder / "secret").chmod(0o666)
    monkeypatch.setenv("ANSWER", SECRET)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def port() -> Iterator[int]:
    """A server on loopback that tells the expected output."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(SECRET.encode())

        threading.Thread(target=answer, daemon=True).start()
        with socket.create_connection(server.getsockname()) as known:
            assert known.recv(100).decode() == SECRET  # it can be had, outside
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def keepers(reward: CodeReward) -> list[psutil.Process]:
    """The processes below the workers: programs, if there are any left, and those that watch them."""
    return [child for pid in reward.pool.pids for child in psutil.Process(pid).children(recursive=True)]


def left_over(reward: CodeReward) -> list[psutil.Process]:
    """Processes in a PID namespace of the keepers other than the keepers, wherever they have been moved."""
    known = keepers(reward)
    rooms = {os.readlink(f"/proc/{keeper.pid}/ns/pid") for keeper in known} - {os.readlink("/proc/self/ns/pid")}
    found = []
    for process in psutil.process_iter():
        try:
            inside = os.readlink(f"/proc/{process.pid}/ns/pid") in rooms
        except OSError:
            continue
        if inside and process not in known:
            found.append(process)
    return found


def test_hostile_programs_earn_0_and_none_survives(level: str, reward: CodeReward, place: Path, port: int) -> None:
    assert len(HOSTILE) >= 40
    strict = CodeReward(time_limit_s=0.2, memory_limit_mb=512, output_limit_kb=64)
    strict.close()
    strict.start()  # again, from an environment that holds the answer
    assert {score.value for score in scores(strict, [f"import time\ntime.sleep(0.3)\n{i}" for i in range(6)], ADD)} == {
        0.0
    }
    before = {process.pid for process in keepers(strict)}  # now that both workers have run something
    assert before
    prints, returns = json.dumps({"inputs": ["a question\n"], "outputs": [f"{SECRET}\n"]}), f"assert f(2) == {SECRET!r}"
    bodies = {**HOSTILE, **({"kills all": KILLS_ALL} if level == "namespaces" else {})}
    told = f"PLACE, PORT = {str(place)!r}, {port}\n"
    tests = [returns if "def f(" in body else prints for body in bodies.values()]
    found = dict(zip(bodies, strict([fenced(told + body) for body in bodies.values()], tests, {}), strict=True))
    assert not {name: score for name, score in found.items() if score.value != 0.0}
    assert sorted(os.listdir(place)) == ["secret"]
    assert (place / "secret").read_text() == SECRET
    after = scores(reward, f"print({SECRET!r})", prints)
    assert after[0].value == 1.0, after  # with the answer, the same tests are passed: it was not to be had
    assert {process.pid for process in keepers(strict)} == before
    assert left_over(strict) == []


def test_expected_outputs_never_reach_a_worker(reward: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    real = reward.pool.run
    monkeypatch.setattr(reward.pool, "run", lambda jobs: sent.extend(map(str, jobs)) or real(jobs))  # type: ignore[func-returns-value]
    scores(reward, "def f(x): return x", "assert f(21) == 31337")
    scores(reward, "print(1)", json.dumps({"inputs": ["22"], "outputs": ["31337"]}))
    scores(reward, "def f(x): return x", json.dumps({"fn_name": "f", "inputs": [[23]], "outputs": [31337]}))
    assert all(question in "".join(sent) for question in ("21", "22", "23"))
    assert "31337" not in "".join(sent)


def test_programs_are_not_root_and_keep_no_privilege(reward: CodeReward) -> None:
    (user,) = scores(reward, "import os\ndef f(x): return os.getuid(), os.geteuid(), os.getgid()", "assert f(1) == 0")
    ids = [int(text) for text in user.detail.rpartition("gave (")[2].rstrip(")").split(",")]
    assert 0 not in ids
    if os.geteuid() == 0:
        assert min(ids) >= 1000 and len(set(ids)) == 1
    refused = "import resource\ndef f(x): return resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 100"
    assert scores(reward, refused, "assert f(1) is True")[0].value == 1.0


def test_a_program_does_not_outlive_a_worker_that_is_killed(reward: CodeReward) -> None:
    own = CodeReward(workers=1, time_limit_s=1.0)
    own.close()
    own.start()
    below = keepers(own)
    ended: list[Score] = []
    long = threading.Thread(target=lambda: ended.extend(scores(own, "while True: pass", ADD)))
    long.start()
    deadline = time.monotonic() + 60
    while len(keepers(own)) == len(below) and time.monotonic() < deadline:
        time.sleep(0.01)
    family = keepers(own)
    assert len(family) > len(below)
    psutil.Process(own.pool.pids[0]).kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    long.join(timeout=120)
    assert ended[0].value == 0.0 and ended[0].status in ("timeout", "crashed")
    own.close()


# --- where walls cannot be put up -------------------------------------------------------------------------------------


def test_a_machine_without_walls_is_refused_before_the_run() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(code_reward.LEVELS, "required", [])
        reward = CodeReward(workers=1)
        for call in (reward.check, reward.start, lambda: scores(reward, "print(3)", ADD)):
            with pytest.raises(ValueError, match=r"cannot be shut in on this machine .*`isolation: available`"):
                call()
        reward.close()


READABLE = [sys.executable, "/usr/bin/python3"]


def test_another_user_than_root_gets_a_user_namespace_or_the_filter() -> None:
    if os.geteuid() != 0:
        pytest.skip("the other tests run as another user than root")
    folder = Path(tempfile.mkdtemp(prefix="judge"))
    try:
        folder.chmod(0o755)
        for file in SANDBOX.glob("program_*.py"):
            shutil.copy(file, folder)
        ask = "; ".join(
            [
                "import json, runpy, os",
                f"judge = runpy.run_path({str(folder / 'program_judge.py')!r})['judge']",
                "ask = lambda level: judge(json.dumps({'levels': [level], 'level': True}), '', 0.0)",
                "levels = [ask('namespaces'), ask('filter')]",
                "print(json.dumps([os.geteuid(), *levels]))",
            ]
        )
        for python in READABLE:
            try:
                found = subprocess.run(
                    [python, "-c", ask],
                    user=54321,
                    group=54321,
                    extra_groups=[],
                    env={},
                    capture_output=True,
                    text=True,
                )
            except OSError:
                continue
            if found.returncode == 0:
                break
        else:
            pytest.skip("no Python here that another user than root may run")
        user, (spaces, why), filtered = json.loads(found.stdout)
        assert user == 54321
        assert spaces == "ok" or "namespaces: " in why
        assert filtered == ["ok", "filter"] or "filter: " in filtered[1]
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"isolation": "none"}, "isolation must be 'required' or 'available', got 'none'"),
        ({"time_limit_s": 0}, "time_limit_s must lie between 0 and 60"),
        ({"memory_limit_mb": 16}, "memory_limit_mb must be at least 128, got 16"),
        ({"output_limit_kb": 0}, "output_limit_kb must be at least 1, got 0"),
        ({"max_answer_chars": 0}, "max_answer_chars must be at least 1, got 0"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CodeReward(**arguments)  # type: ignore[arg-type]
