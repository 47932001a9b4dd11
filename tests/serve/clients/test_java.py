"""Java's own client, java.net.http, which offers HTTP/2 with each request unless it is told not to."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.skipif(shutil.which("javac") is None, reason="there is no javac")]


@pytest.fixture(scope="module")
def chat(key: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[str]]:
    """``chat(address, version)``: the lines of the program."""
    folder = tmp_path_factory.mktemp("classes")
    subprocess.run(["javac", "-d", str(folder), str(Path(__file__).with_name("ChatClient.java"))], check=True)

    def run(address: str, version: str) -> list[str]:
        command = ["java", "-cp", str(folder), "ChatClient", f"{address}/v1", key, version]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()

    return run


@pytest.mark.parametrize(("server", "version"), [("h11", "default"), ("server", "HTTP_1_1"), ("h11", "HTTP_1_1")])
def test_it_gets_answers_from_h11_or_as_http_1_1(
    servers: dict[str, str],
    chat: Callable[[str, str], list[str]],
    wait_until_idle: Callable[..., None],
    server: str,
    version: str,
) -> None:
    first, again, stream, unknown, late = chat(servers[server], version)
    assert first[:4] == again[:4] == "200 "
    texts = [json.loads(line[4:])["choices"][0]["message"]["content"] for line in (first, again)]
    assert texts[0] == texts[1] != ""
    events, last = stream.split(maxsplit=1)
    assert int(events) > 2 and last == "data: [DONE]"
    assert (unknown, late) == ("401", "timed out")
    wait_until_idle(server)


def test_its_offer_of_http_2_is_refused_with_what_to_do(
    servers: dict[str, str], chat: Callable[[str, str], list[str]]
) -> None:
    first = chat(servers["server"], "default")[0]
    assert first[:4] == "400 "
    assert json.loads(first[4:])["error"]["code"] == "upgrade_not_supported"
