"""Lines on a full disk: left out, told once, and written again when there is room."""

import json
import subprocess
import sys
from pathlib import Path

FULL = """
import os, sys
from serve.logs import configure_logs, log_request, open_access_log, write_output
configure_logs()
open_access_log()
write_output("begins")
for i in range(1000):
    log_request(path=f"/{i}")
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 1)
log_request(path="/room")
log_request(path="/more")
"""


def test_a_full_disk_is_told_once_and_written_to_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", FULL, log], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert done.returncode == 0
    full, again = done.stderr.splitlines()
    assert "standard output cannot be written: No space left on device" in full
    assert "standard output can be written again; 1001 lines were left out" in again
    assert [json.loads(line)["path"] for line in log.read_text().splitlines()] == ["/room", "/more"]


TORN = """
import resource, sys
from serve.logs import configure_logs, log_request, open_access_log
configure_logs()
open_access_log()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))  # in the middle of the second line
for i in range(10):
    log_request(path=f"/{i}")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log_request(path="/room")
"""


def test_half_a_line_is_ended_before_the_next(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as out:
        done = subprocess.run([sys.executable, "-c", TORN], stdout=out, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, torn, last = log.read_text().splitlines()
    assert (json.loads(first)["path"], json.loads(last)["path"]) == ("/0", "/room")
    assert len(first) + 1 + len(torn) == 100


def test_a_log_that_cannot_be_written_says_so_where_it_goes_on(tmp_path: Path) -> None:
    """As when standard output and standard error are one file."""
    log = tmp_path / "log"
    with log.open("w") as out:
        done = subprocess.run([sys.executable, "-c", TORN], stdout=out, stderr=out, timeout=120)
    assert done.returncode == 0
    told = log.read_text()
    assert "Traceback" not in told
    assert "(left out before this line, because they could not be written: 1)" in told
    assert "9 lines were left out" in told
