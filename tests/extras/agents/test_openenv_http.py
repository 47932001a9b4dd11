"""An OpenEnv server over HTTP: a real one, small, that speaks the protocol."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from grpo_pl.extras.agents import EnvironmentPool, episode_value, openenv_http, play
from grpo_pl.extras.agents.openenv_http import OpenEnvEnvironment
from tests.extras.agents.turns import reset, step


class EchoServer(ThreadingHTTPServer):
    """Echoes messages; a message is worth its length in tenths; the third ends the episode."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, Any]] = []
        self.steps = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: EchoServer

    def do_GET(self) -> None:
        self._answer({"status": "healthy"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        if self.path == "/reset":
            self.server.steps = 0
            self._answer({"observation": {"echoed_message": "ready", "metadata": {}}, "reward": None, "done": False})
            return
        message = body["action"]["message"]
        self.server.steps += 1
        replies: dict[str, Any] = {
            "crash": {"detail": "boom"},
            "nothing": {"done": True},
            "nan": {"observation": {"text": ""}, "reward": float("nan"), "done": False},
        }
        reply = replies.get(
            message,
            {
                "observation": {"echoed_message": message, "metadata": {}},
                "reward": len(message) / 10,
                "done": self.server.steps == 3,
            },
        )
        self._answer(reply, 500 if message == "crash" else 200)

    def _answer(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[EchoServer]]:
    started = [EchoServer(), EchoServer()]
    threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}) for server in started]
    for thread in threads:
        thread.start()
    yield started
    for server, thread in zip(started, threads, strict=True):
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_episode_is_played_over_http(servers: list[EchoServer]) -> None:
    turns = play(OpenEnvEnvironment(urls=[servers[0].url]), ["a", "bb", "ccc", "dddd"], seed=-1)
    assert [turn.observation for turn in turns] == ["ready", "a", "bb", "ccc"]
    assert turns[-1].terminated and episode_value(turns) == 0.6
    (path, body), step, *_ = servers[0].requests
    assert path == "/reset" and body["seed"] == 2**31 - 1 and len(body["episode_id"]) == 32
    assert step == ("/step", {"action": {"message": "a"}})


def test_as_many_episodes_at_once_as_there_are_servers(servers: list[EchoServer]) -> None:
    with EnvironmentPool(OpenEnvEnvironment(urls=[server.url for server in servers])) as pool:
        starts = reset(pool, *range(3))
        assert sorted(start.status for start in starts.values()) == ["ok", "ok", "unavailable"]
        refused = next(start for start in starts.values() if start.done)
        assert "all 2 servers are in use" in refused.detail and episode_value([refused]) is None
        playing = [episode for episode, start in starts.items() if not start.done]
        pool.release(playing[0])
        assert reset(pool, 7)[7].status == "ok"  # its server is free again


@pytest.mark.parametrize(
    ("action", "status"), [("crash", "unavailable"), ("nothing", "malformed"), ("nan", "malformed")]
)
def test_a_server_that_fails_costs_the_episode(servers: list[EchoServer], action: str, status: str) -> None:
    with EnvironmentPool(OpenEnvEnvironment(urls=[servers[0].url])) as pool:
        reset(pool, 0)
        turn = step(pool, {0: action})[0]
        assert (turn.status, turn.blame) == (status, "environment")


def test_the_action_and_the_observation_can_be_shaped(servers: list[EchoServer]) -> None:
    environment = OpenEnvEnvironment(
        urls=[servers[0].url], action=lambda text: {"message": text.upper()}, observe=lambda seen: f"<{min(seen)}>"
    )
    assert play(environment, ["a"])[-1].observation == "<echoed_message>"
    assert servers[0].requests[-1] == ("/step", {"action": {"message": "A"}})


def test_no_server_is_found_out_before_the_first_episode() -> None:
    with pytest.raises(ValueError, match=r"no OpenEnv server answers: http://127\.0\.0\.1:9/health"):
        EnvironmentPool(OpenEnvEnvironment(urls=["http://127.0.0.1:9"])).start()
    with pytest.raises(ValueError, match="must be a list"):
        OpenEnvEnvironment(urls="http://127.0.0.1:9")
    with pytest.raises(ValueError, match="isolation must be 'thread', not 'process'"):
        OpenEnvEnvironment(urls=["http://127.0.0.1:9"], isolation="process")


def test_every_rank_has_servers_of_its_own(servers: list[EchoServer], monkeypatch: pytest.MonkeyPatch) -> None:
    """All would begin with the first that they find free."""
    urls = [server.url for server in servers]
    for rank in range(2):
        monkeypatch.setattr(openenv_http, "_rank_and_world", lambda rank=rank: (rank, 2))
        with pytest.raises(ValueError, match="urls names 1 servers for 2 training processes: each needs its own"):
            OpenEnvEnvironment(urls=urls[:1]).prepare()
        assert play(OpenEnvEnvironment(urls=urls), [], seed=rank)[0].observation == "ready"
    assert [[body["seed"] for _, body in server.requests] for server in servers] == [[0], [1]]
