"""Programs run against tests: what is right earns 1; what cheats, hangs or attacks earns 0, and leaves nothing."""

# ruff: noqa: E501

import json
import math
import os
import pickle
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import grpo_pl
from grpo_pl import extras, moved
from grpo_pl.extras import code
from grpo_pl.extras.code import code_reward
from grpo_pl.rewards import CodeReward, Score
from grpo_pl.rewards.base import MissingColumn

from .hostile import HOSTILE, KILLS_ALL, SECRET

FENCE = "```"
PACKAGES = [grpo_pl.__file__, moved.__file__, extras.__file__, code.__file__]
ADD = json.dumps({"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]})
SQUARE = json.dumps(["assert square(3) == 9", "assert square(-2) == 4"])


def fenced(program: str) -> str:
    return f"This solves it:\n{FENCE}python\n{program}\n{FENCE}"


def scores(reward: CodeReward, program: str | Sequence[str], tests: str) -> list[Score]:
    programs = [program] if isinstance(program, str) else program
    return reward([fenced(text) for text in programs], [tests] * len(programs), {})


def can_be_had(level: str) -> bool:
    """Whether other tools say that this machine has what isolation is made of."""
    if platform.machine() not in ("x86_64", "aarch64") or not Path("/proc/self/status").exists():
        return False
    if level == "filter":
        return "Seccomp_filters:" in Path("/proc/self/status").read_text()
    flags = ["--mount", "--net", "--ipc", "--uts", "--pid", "--fork", *([] if os.geteuid() == 0 else ["--user"])]
    tool = shutil.which("unshare")
    mounted = ["mount", "-t", "tmpfs", "none", "/tmp"]
    return tool is not None and subprocess.run([tool, *flags, *mounted], capture_output=True).returncode == 0


LEVELS = ["namespaces", "filter"] if can_be_had("namespaces") else ["filter", "namespaces"]


@pytest.fixture(scope="module", params=[LEVELS[0], pytest.param(LEVELS[1], marks=pytest.mark.slow)])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level of isolation that this machine has, by itself; by default the best one."""
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
        ("import os\nassert os.path.isabs(__file__) and os.path.basename(__file__) == 'program.py'\n"
         "print(sum(map(int, input().split())))", ADD),
        ("import os\ndef square(x): return os.path.dirname(__file__) and x * x", SQUARE),
        ("square = lambda x: x * x", SQUARE),
        ("def square(x):\n    print('so', x)\n    return pow(x, 2)", SQUARE),
        ("class Solution:\n    def both(self, a: List[int], b: Optional[int] = None): return (a, b)",
         json.dumps({"fn_name": "both", "inputs": ["[1]\n2"], "outputs": ["[[1], 2]"]})),
        ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\ndef f(x): return dataclasses.asdict(P(x))",
         "assert f(3) == {'x': 3}"),
        ("def f(x): return {(1, 2): {3}}, 0.1 + 0.2", "assert f(0)[0] == {(1, 2): {3}}\nassert f(0)[1] != 0.3"),
    ],
)  # fmt: skip
def test_right_programs_earn_1_at_each_level(reward: CodeReward, program: str, tests: str) -> None:
    (score,) = scores(reward, program, tests)
    assert (score.value, score.status) == (1.0, "ok"), score


IN_PLACE = "xs = [3, 1, 2]\nsort_in_place(xs)\nassert xs == [1, 2, 3]\nassert sort_in_place([]) is None"


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("xs.sort()", 1.0),
        ("xs[:] = sorted(xs)", 1.0),
        ("return sorted(xs)", 0.0),
        ("xs.reverse()", 0.0),
        ("1 / 0", 0.0),
    ],
)
def test_a_function_that_works_in_place_is_judged_by_what_it_changed(
    reward: CodeReward, body: str, value: float
) -> None:
    assert scores(reward, f"def sort_in_place(xs): {body}", IN_PLACE)[0].value == value


def test_a_call_in_the_tests_that_raises_fails_them(reward: CodeReward) -> None:
    tests = "xs = [1, 2, 3]\nsort_in_place(xs)\nassert xs == [1, 2, 3]"
    (score,) = scores(reward, "def sort_in_place(xs): raise KeyError(7)", tests)
    assert (score.value, score.status) == (0.0, "wrong") and "KeyError: 7" in score.detail


VALUES = {
    "generator": "def f(n):\n    for i in range(n): yield i",
    "endless generator": "import itertools\ndef f(n): return itertools.count()",
    "iterator": "def f(n): return iter(range(n))",
    "map": "def f(n): return map(int, '012'[:n])",
    "zip": "def f(n): return zip(range(n), 'abc')",
    "filter": "def f(n): return filter(lambda i: i < n, [0, 1, 2, 3, 4])",
    "reversed": "def f(n): return reversed(range(n))",
    "enumerate": "def f(n): return enumerate('abc'[:n])",
    "iterator of its own": "class I:\n    def __init__(self, n): self.i, self.n = -1, n\n    def __iter__(self): return self\n"
    "    def __next__(self):\n        self.i += 1\n        if self.i == self.n: raise StopIteration\n        return self.i\n"
    "def f(n): return I(n)",
    "sequence of its own": "class S:\n    def __len__(self): return 3\n    def __getitem__(self, i): return range(3)[i]\n"
    "def f(n): return S()",
    "range": "def f(n): return range(n)",
    "keys": "def f(n): return dict.fromkeys(range(n)).keys()",
    "values": "def f(n): return {'a': 0, 'b': 1, 'c': 2}.values()",
    "items": "def f(n): return dict(enumerate('abc')).items()",
    "deque": "from collections import deque\ndef f(n): return deque(range(n))",
    "array": "from array import array\ndef f(n): return array('i', range(n))",
    "bytes": "def f(n): return bytes(range(n))",
    "bytearray": "def f(n): return bytearray(range(n))",
    "Counter": "from collections import Counter\ndef f(n): return Counter(range(n))",
    "defaultdict": "from collections import defaultdict\ndef f(n): return defaultdict(int, {0: 1})",
    "OrderedDict": "from collections import OrderedDict\ndef f(n): return OrderedDict([(0, 'a')])",
    "UserList": "from collections import UserList\ndef f(n): return UserList([0, 1, 2])",
    "frozenset": "def f(n): return frozenset(range(n))",
    "named tuple": "from collections import namedtuple\ndef f(n): return namedtuple('P', 'x y z')(0, 1, 2)",
    "subclass of list": "class L(list): pass\ndef f(n): return L(range(n))",
    "Fraction": "from fractions import Fraction\ndef f(n): return Fraction(n, 2)",
    "Decimal": "from decimal import Decimal\ndef f(n): return Decimal(n) / 2",
    "complex": "def f(n): return complex(1.5, 0)",
    "subclass of float": "class F(float): pass\ndef f(n): return F(1.5)",
    "subclass of str": "class T(str): pass\ndef f(n): return T('012')",
    "member of IntEnum": "from enum import IntEnum\nclass E(IntEnum):\n    A = 3\ndef f(n): return E.A",
    "member of StrEnum": "from enum import Enum\nclass E(str, Enum):\n    A = '012'\ndef f(n): return E.A",
    "member of Enum": "from enum import Enum\nclass E(Enum):\n    A = 3\ndef f(n): return E.A",
    "date": "import datetime\ndef f(n): return datetime.date(2024, 2, n)",
    "text": "def f(n): return '012'[:n]",
    "list": "def f(n): return list(range(n))",
}
"""Name -> a program whose ``f(3)`` is of that kind."""
ASSERTIONS = [
    "f(3) == [0, 1, 2]", "list(f(3)) == [0, 1, 2]", "sorted(f(3)) == [0, 1, 2]", "tuple(f(3)) == (0, 1, 2)",
    "set(f(3)) == {2, 1, 0}", "f(3) == {0, 1, 2}", "sorted(f(3), reverse=True) == [2, 1, 0]", "sum(f(3)) == 3",
    "max(f(3)) == 2", "[*f(3)] == [0, 1, 2]", "list(map(str, f(3))) == ['0', '1', '2']", "next(f(3)) == 0",
    "next(iter(f(3))) == 0", "len(f(3)) == 3", "f(3)[1] == 1", "f(3)[:2] == [0, 1]", "2 in f(3)", "7 not in f(3)",
    "list(f(3)) == [0, 1, 3]", "list(f(3)) == [(0, 'a'), (1, 'b'), (2, 'c')]", "dict(f(3)) == {0: 'a', 1: 'b', 2: 'c'}",
    "list(f(3)) == ['0', '1', '2']", "''.join(f(3)) == '012'", "f(3) == '012'", "f(3) != '012'", "f(3) is not None",
    "f(3) == 1.5", "abs(f(3) - 1.5) < 1e-9", "f(3) > 1", "float(f(3)) == 1.5", "str(f(3)) == '3/2'", "str(f(3)) == '1.5'",
    "f(3) == 1.5 + 0j", "f(3) == 3", "f(3).value == 3", "f(3).name == 'A'", "f(3) * 2 == 3", "round(f(3), 1) == 1.5",
    "f(3) == {0: 1}", "f(3) == {0: 'a'}", "f(3) == (0, 1, 2)", "f(3) == b'\\x00\\x01\\x02'", "f(3) == range(3)", "f(3).day == 3",
    "math.isclose(f(3), 1.5)", "not f(3)", "bool(f(3))", "all(f(3))", "any(f(3))", "list(reversed(f(3))) == [2, 1, 0]",
]  # fmt: skip


ENDLESS = {
    ("endless generator", a)
    for a in ASSERTIONS
    if not a.startswith(
        ("f(3)", "next", "2 in", "float", "abs", "bool", "len", "round", "str", "math", "not", "any", "sum")
    )
} | {("endless generator", "sum(f(3)) == 3")}  # Python itself never ends on these


def decided(reward: CodeReward, pairs: Sequence[tuple[str, str]]) -> tuple[list[float], list[Score]]:
    """What Python says, with the assertion after the program in one process, and what the reward says."""
    truth = []
    for name, assertion in pairs:
        names: dict[str, object] = {"math": math}
        try:
            exec(f"{VALUES[name]}\nassert {assertion}", names)
        except Exception:
            truth.append(0.0)
        else:
            truth.append(1.0)
    tests = [f"import math\nassert {assertion}" for _, assertion in pairs]
    return truth, reward([fenced(VALUES[name]) for name, _ in pairs], tests, {})


PAIRS = [(name, assertion) for name in VALUES for assertion in ASSERTIONS if (name, assertion) not in ENDLESS]


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_an_assertion_decides_as_python_does_whatever_the_value(reward: CodeReward, step: int) -> None:
    some = PAIRS[::step]
    truth, found = decided(reward, some)
    assert [(p, s) for p, t, s in zip(some, truth, found, strict=True) if s.value != t] == []
    assert 400 / step < sum(truth) < 1100 / step


LIES = [
    "class A(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__",
    "class A(float):\n    def __new__(c, *a): return float.__new__(c, 7)\n    def __eq__(self, other): return True\n"
    "    __lt__ = __gt__ = __le__ = __ge__ = __eq__",
    "class A(int):\n    def __new__(c, *a): return int.__new__(c, 7)\n    def __eq__(self, other): return True\n"
    "    __sub__ = __rsub__ = lambda self, other: 0\n    __abs__ = lambda self: self\n    __index__ = __int__ = lambda self: 31337",
    "class A(list):\n    def __eq__(self, other): return True\n    def __iter__(self): return iter([A()])\n"
    "    def __len__(self): return 1\n    def __contains__(self, x): return True",
    "class A(dict):\n    def __eq__(self, other): return True\n    def items(self): return [(A2(), A2())]\n"
    "class A2:\n    def __eq__(self, o): return True\n    def __hash__(self): return 0",
    "from collections import deque\nclass A(deque):\n    def __eq__(self, other): return True",
    "from fractions import Fraction\nclass A(Fraction):\n    def __new__(c, *a): return Fraction.__new__(c, 7, 2)\n"
    "    def __eq__(self, other): return True\n    numerator = denominator = property(lambda self: A())",
    "from decimal import Decimal\nclass A(Decimal):\n    def __new__(c, *a): return Decimal.__new__(c, 'sNaN')\n"
    "    def __eq__(self, other): return True\n    def __str__(self): return '0'",
    "class A:\n    __class__ = str\n    def __eq__(self, other): return True",
    "class A:\n    def __iter__(self): return self\n    def __next__(self): return A()\n    def __eq__(self, o): return True\n"
    "    def __contains__(self, x): return True",
    "class A:\n    def __eq__(self, other): return True\nsorted = list = set = tuple = lambda *a, **k: A()\nlen = lambda x: A()",
    "from enum import Enum\nclass E(str, Enum):\n    A = 'x'\n    def __eq__(self, other): return True\ndef A(*a): return E.A",
    "class M(type):\n    def __instancecheck__(c, x): return True\n    def __eq__(c, o): return True\n    __hash__ = None\n"
    "class A(metaclass=M): pass",
    "import collections.abc, json\ncollections.abc.Iterator.register(str)\njson.dumps = lambda x: '{\"value\": NaN}'\nA = str",
    "def A(*a): return float('nan')",
]  # fmt: skip
"""Programs with an ``A`` that says that it is equal to everything."""
EXPECTED = [
    "f(1) == 31337", "f(1) == 'tulip'", "f(1) == [31337]", "f(1) == {'tulip': 31337}", "list(f(1)) == [31337]",
    "sorted(f(1)) == [31337]", "set(f(1)) == {31337}", "len(f(1)) == 31338", "abs(f(1) - 31337) < 1e-6", "31337 in f(1)",
    "math.isclose(f(1), 31337)", "isclose(f(1), 31336)", "f(1) == Fraction(31337, 2)", "f(1)[0] == 31338", "[f(1)] == [31338]",
    "f(1) == Counter([31337])", "''.join(f(1)) == 'tulip'", "max(f(1), key=str) == 31338", "f(1) > 31336 and f(1) < 31338",
]  # fmt: skip


def test_what_says_that_it_is_equal_to_everything_earns_nothing(reward: CodeReward) -> None:
    programs = [
        f"{lie}\ndef f(x): return A()\ndef isclose(*a, **k): return True\nFraction = Counter = A" for lie in LIES
    ]
    tests = "import math\n" + "\n".join(f"assert {expected}" for expected in EXPECTED)
    strict = CodeReward(partial=True, time_limit_s=1.0)  # whose value is above 0 if one assertion is passed
    found = strict([fenced(program) for program in programs], [tests] * len(programs), {})
    assert [(p, s) for p, s in zip(programs, found, strict=True) if s.value != 0.0] == []
    (knows,) = strict([fenced("def f(x): return 31337")], [tests], {})
    assert knows.value and knows.value > 0.1


def test_a_folder_to_write_to_and_the_whole_library_are_there_behind_namespaces(level: str, reward: CodeReward) -> None:
    program = (
        "import asyncio, sqlite3, xml.dom\nwith open('notes', 'w') as f: f.write(input())\n"
        "async def main(): print(sum(map(int, open('notes').read().split())))\nasyncio.run(main())"
    )
    (score,) = scores(reward, program, ADD)
    assert score.value == (1.0 if level == "namespaces" else 0.0)


POOLS = ["multiprocessing.dummy import Pool", "multiprocessing.pool import ThreadPool as Pool",
         "concurrent.futures import ThreadPoolExecutor as Pool"]  # fmt: skip


def test_pools_of_threads_work_behind_namespaces_and_pools_of_processes_nowhere(level: str, reward: CodeReward) -> None:
    program = "print(sum(Pool(3).map(int, input().split())))"
    found = scores(reward, [f"from {pool}\n{program}" for pool in POOLS], ADD)
    assert [score.value for score in found] == [1.0 if level == "namespaces" else 0.0] * len(POOLS)
    (full,) = scores(reward, "for name in ('/dev/shm/a', '/tmp/b'): open(name, 'wb').write(b'x' * 10**7)", ADD)
    assert full.value == 0.0 and ("No space left" in full.detail) == (level == "namespaces")  # it is the same folder
    processes = scores(reward, [f"from multiprocessing import Pool\n{program}"], ADD)
    assert processes[0].value == 0.0


LOOKS = f"""
import os, sys
ours = [name for name in sys.modules if name.partition(".")[0] == "grpo_pl"]
folders = [{sysconfig.get_path("purelib")!r}, {os.path.dirname(grpo_pl.__file__)!r}]
outside = [folder for folder in folders if os.path.exists(folder) and not folder.startswith(os.path.dirname(os.__file__))]
inside = [folder for folder in sys.path if not folder.startswith(os.path.dirname(os.__file__))]
print(ours, outside, inside)
"""


def test_a_program_finds_neither_this_package_nor_the_others_that_are_installed(reward: CodeReward) -> None:
    tests = json.dumps({"inputs": [""], "outputs": ["[] [] []\n"]})
    (score,) = scores(reward, LOOKS, tests)
    assert (score.value, score.status) == (1.0, "ok"), score


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


def supervisors(reward: CodeReward) -> list[psutil.Process]:
    """The processes below the workers: programs, if there are any left, and those that watch them."""
    return [child for pid in reward.pool.pids for child in psutil.Process(pid).children(recursive=True)]


def left_over(reward: CodeReward) -> list[psutil.Process]:
    """Processes in a PID namespace of the supervisors other than these, wherever they have been moved."""
    known = supervisors(reward)
    namespaces = {os.readlink(f"/proc/{process.pid}/ns/pid") for process in known} - {os.readlink("/proc/self/ns/pid")}
    found = []
    for process in psutil.process_iter():
        try:
            inside = os.readlink(f"/proc/{process.pid}/ns/pid") in namespaces
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
    before = {process.pid for process in supervisors(strict)}  # now that both workers have run something
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
    assert {process.pid for process in supervisors(strict)} == before
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


def test_a_program_does_not_see_how_its_worker_was_started(reward: CodeReward) -> None:
    program = "import sys\ndef f(x): return sys.argv + sys.orig_argv"
    assert scores(reward, program, "assert f(1) == ['program.py', 'program.py']")[0].value == 1.0


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
    below = supervisors(own)
    ended: list[Score] = []
    long = threading.Thread(target=lambda: ended.extend(scores(own, "while True: pass", ADD)))
    long.start()
    deadline = time.monotonic() + 60
    while len(supervisors(own)) == len(below) and time.monotonic() < deadline:
        time.sleep(0.01)
    family = supervisors(own)
    assert len(family) > len(below)
    psutil.Process(own.pool.pids[0]).kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    long.join(timeout=120)
    assert ended[0].value == 0.0 and ended[0].status in ("timeout", "crashed")
    own.close()


# --- where programs cannot be isolated --------------------------------------------------------------------------------


def test_a_machine_without_isolation_is_refused_before_the_run() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(code_reward.LEVELS, "required", [])
        reward = CodeReward(workers=1)
        for call in (reward.check, reward.start, lambda: scores(reward, "print(3)", ADD)):
            with pytest.raises(ValueError, match=r"cannot be isolated on this machine .*`isolation: available`"):
                call()
        reward.close()


READABLE = [sys.executable, "/usr/bin/python3"]


def test_another_user_than_root_gets_a_user_namespace_or_the_filter() -> None:
    if os.geteuid() != 0:
        pytest.skip("the other tests run as another user than root")
    folder = Path(tempfile.mkdtemp(prefix="judge"))
    try:
        folder.chmod(0o755)
        package = Path(grpo_pl.__file__).parent
        for file in [*PACKAGES, *package.glob("processes/*.py"), *package.glob("extras/code/program_*.py")]:
            copy = folder / "grpo_pl" / Path(file).relative_to(package)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
        ask = (
            f"import json, os, sys; sys.path.insert(0, {str(folder)!r})\n"
            "from grpo_pl.extras.code.program_judge import judge, prepare; prepare('')\n"
            "ask = lambda level: judge(json.dumps({'levels': [level], 'level': True}), '', 0.0)\n"
            "print(json.dumps([os.geteuid(), ask('namespaces'), ask('filter')]))"
        )
        for python in READABLE:
            other: dict[str, Any] = {"user": 54321, "group": 54321, "extra_groups": [], "env": {}}
            try:
                found = subprocess.run([python, "-c", ask], capture_output=True, text=True, **other)
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
        ({"memory_limit_mb": 16}, "reward 'code' needs memory_limit_mb >= 128, got 16"),
        ({"output_limit_kb": 0}, "needs output_limit_kb >= 1, got 0"),
        ({"max_answer_chars": 0}, "needs max_answer_chars >= 1, got 0"),
        ({"workers": 0}, "needs workers >= 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        CodeReward(**arguments)  # type: ignore[arg-type]
