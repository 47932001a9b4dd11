"""Lines on a full disk: left out, told once, and written again when there is room."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

from serve.logs import configure_logs, log_request, open_access_log, write_output
from tests.forked import Forked


def _written(run: Callable[[], None], log: Path, errors: Path | None = None) -> str:
    """What ``run()`` writes to ``errors``, else as its other output to ``log``, in a process of its own."""

    def there() -> int:
        if errors is not None:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        configure_logs()
        open_access_log()
        run()
        return 0

    with log.open("w") as out:
        assert Forked(there, env=os.environ, output=out.fileno()).wait(120) == 0
    return "" if errors is None else errors.read_text()


def test_a_full_disk_is_told_once_and_written_to_again(tmp_path: Path) -> None:
    def run() -> None:
        write_output("begins")
        for i in range(1000):
            log_request(path=f"/{i}")
        os.dup2(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), 1)
        log_request(path="/room")
        log_request(path="/more")

    full, again = _written(run, Path("/dev/full"), tmp_path / "errors").splitlines()
    assert "standard output cannot be written: No space left on device" in full
    assert "standard output can be written again; 1001 lines were left out" in again
    assert [json.loads(line)["path"] for line in (tmp_path / "log").read_text().splitlines()] == ["/room", "/more"]


def _torn() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))  # in the middle of the second line
    for i in range(10):
        log_request(path=f"/{i}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log_request(path="/room")


def test_half_a_line_is_ended_before_the_next(tmp_path: Path) -> None:
    _written(_torn, tmp_path / "log", tmp_path / "errors")
    first, torn, last = (tmp_path / "log").read_text().splitlines()
    assert (json.loads(first)["path"], json.loads(last)["path"]) == ("/0", "/room")
    assert len(first) + 1 + len(torn) == 100


def test_a_log_that_cannot_be_written_says_so_where_it_goes_on(tmp_path: Path) -> None:
    """As when standard output and standard error are one file."""
    _written(_torn, tmp_path / "log")
    told = (tmp_path / "log").read_text()
    assert "Traceback" not in told
    assert "(left out before this line, because they could not be written: 1)" in told
    assert "9 lines were left out" in told
