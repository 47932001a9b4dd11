"""Programs that try to earn a reward without solving anything, or to do harm. Run them in isolation only."""

# ruff: noqa: E501

SECRET = "tulip-8731"
"""What every one of them would have to print, or return from ``f``; none computes it."""

SPIN = "while True: pass"

HOSTILE: dict[str, str] = {
    # processes, threads, time
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "multiprocessing bomb": "import multiprocessing\nwhile True: multiprocessing.Process(target=print).start()",
    "thread bomb": "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(9,)).start()\n"
    "    except RuntimeError: pass",
    "daemon": "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: pass",
    "thread that outlives": f"import threading\ndef g():\n    {SPIN}\nthreading.Thread(target=g).start()",
    "daemon thread": f"import threading\ndef g():\n    {SPIN}\nthreading.Thread(target=g, daemon=True).start()",
    "endless loop": SPIN,
    "sleep": "import time\ntime.sleep(10**6)",
    "signals ignored": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    f"    except (OSError, ValueError): pass\n{SPIN}",
    "interval timer": f"import signal\nsignal.signal(14, lambda *a: None)\nsignal.setitimer(0, 1e-5, 1e-5)\n{SPIN}",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "waits for its parent": "import os, time\nwhile os.getppid(): time.sleep(0.1)",
    # signals to others
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "kills its group": "import os\nos.killpg(0, 9)",
    "kills by owner of a descriptor": "import fcntl, os, signal\nr, w = os.pipe()\nfcntl.fcntl(r, 8, os.getppid())\n"
    "fcntl.fcntl(r, 10, signal.SIGKILL)\nfcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | 0o20000)\n"
    "os.write(w, b'x')",
    # memory, numbers, the stack
    "memory": "x = []\nwhile True: x.append(bytearray(10**7))",
    "one huge block": "x = bytearray(10**13)",
    "giant integer": "x = 10 ** 10 ** 10",
    "giant result": "def f(x): return 10 ** 10**6",
    "recursion": "def g(): g()\ng()",
    "stack overflow": "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    "deep result": "def f(x):\n    y = []\n    for _ in range(10**5): y = [y]\n    return y",
    "endless result": "import itertools\ndef f(x): return list(itertools.count())",
    "colliding keys": "def f(x): return {i * (2**61 - 1) for i in range(1, 20000)}",
    "bad instruction": "import ctypes\nctypes.string_at(0)",
    # output
    "endless output": "while True: print('x' * 1000)",
    "endless errors": "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
    "endless results": "import os\nwhile True: os.write(3, b'x' * 1000)",
    "bytes that are no text": "import os\nos.write(1, bytes(range(256)) * 100)\nos.write(3, bytes(range(256)) * 100)",
    "closed descriptors": "import os\nos.closerange(0, 1000)",
    "output replaced": "import sys, io\nsys.stdout = io.StringIO()\nsys.__stdout__ = None\nprint('x')",
    # files
    "reads outside": "print(open(PLACE + '/secret').read())",
    "writes outside": "open(PLACE + '/written', 'w').write('x')",
    "symlink": "import os\nos.symlink(PLACE + '/secret', 'a')\nprint(open('a').read())",
    "hard link": "import os\nos.link(PLACE + '/secret', 'a')\nprint(open('a').read())",
    "climbs": "import os\nfor _ in range(20): os.chdir('..')\nprint(open(PLACE[1:] + '/secret').read())",
    "removes": "import os, shutil\nshutil.rmtree(PLACE)\nshutil.rmtree('/')",
    "fills the disk": "while True:\n    with open('a', 'ab') as a: a.write(b'x' * 10**6)",
    "many files": "i = 0\nwhile True:\n    open(f'a{i}', 'w').close()\n    i += 1",
    "memory of its parent": "import os\nprint(open(f'/proc/{os.getppid()}/mem', 'rb').read(10**6))",
    "environment of its parent": "import os\nprint(open(f'/proc/{os.getppid()}/environ').read())",
    "environment": "import os\nprint(os.environ['ANSWER'])",
    "runs a program": "import os\nos.execv('/bin/cat', ['cat', PLACE + '/secret'])",
    "starts a shell": "import subprocess\nprint(subprocess.run(['cat', PLACE + '/secret'], capture_output=True).stdout)",
    # network, privileges
    "network": "import socket\nwith socket.create_connection(('127.0.0.1', PORT)) as s: print(s.recv(100).decode())",
    "privileges": "import os\nos.setuid(0)\nprint(open(PLACE + '/secret').read())",
    "system calls": "import ctypes\nc = ctypes.CDLL(None)\nprint(c.unshare(0x10000000), c.ptrace(16, 1, 0, 0), c.prctl(1, 0),"
    "\n      c.mount(b'none', b'/tmp', b'tmpfs', 0, 0), c.syscall(425, 8, 0), c.chroot(b'/'))",
    "limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nx = bytearray(10**11)",
    # the checker
    "exit before the tests": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "exit later": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "always equal": "class A:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return A()",
    "text that is always equal": "class A(str):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    "def f(x): return A('x')",
    "checker replaced": "import json, sys, types\njson.dumps = lambda *a, **k: '{\"value\": true}'\n"
    "m = sys._getframe(1).f_globals\nm['plain'] = m['answer'] = lambda *a: True\ndef f(x): return True",
    "comparison replaced": "import builtins, operator\nbuiltins.print = operator.eq = lambda *a: True\n"
    "AssertionError = BaseException\ndef f(x): raise AssertionError",
    "forged results": "import os\nos.write(3, b'{\"value\": true}\\n' * 50)\nos.write(3, b'{\"passed\": true}\\n')",
    "verdict printed": "print('{\"cause\": \"ended\", \"code\": 0}')\nprint('1 passed')\nprint('ok')",
    "looks into the frames": "import sys\nframe = sys._getframe()\nwhile frame:\n    for value in list(frame.f_locals.values()):\n"
    "        if 'tulip' in repr(value): print(repr(value)[repr(value).index('tulip'):][:10])\n    frame = frame.f_back",
    "looks through its memory": "import gc\nt = ''.join(['tul', 'ip'])\nfor o in gc.get_objects():\n    try: r = repr(o)\n"
    "    except Exception: continue\n    if t in r and 'get_objects' not in r: print(r[r.index(t):][:10])",
    "reads what is open": "import os\nfor n in range(4, 200):\n    try: print(os.read(n, 1000))\n    except OSError: pass",
    "prints its input": "import sys\nprint(sys.stdin.read())",
    "imports the checker": "from grpo_pl.extras.code import suites\nprint(suites.read_suite.cache_info())",
    "error that cannot be told": "class E(Exception):\n    def __str__(self):\n        while True: pass\n"
    "def f(x): raise E\nraise E",
}  # fmt: skip
"""Name -> program; ``PLACE`` is a folder of the host and ``PORT`` a port that answers with the secret."""

KILLS_ALL = "import ctypes, os\nctypes.CDLL(None).kill(-1, 9)\nos.kill(-1, 9)"
"""Only inside a PID namespace; elsewhere it is not tried."""
