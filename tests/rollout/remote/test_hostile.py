"""What a server refuses: strangers, other addresses, files that are not its own, bodies that are not what they say."""

import contextlib
import json
import os
import socket
import ssl
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from grpo_pl.rollout.child.outline import Outline
from grpo_pl.rollout.engine import EngineDied
from grpo_pl.rollout.remote import RemoteEngine, wire
from grpo_pl.rollout.remote.settings import ServerSettings, forget_secrets, token_of
from grpo_pl.rollout.remote.weight_files import NoFile, WeightFiles
from grpo_pl.types import GenerateRequest, Rollout, SampleKey, SamplingParams

ENGINE = "/v1/engine"
ONE, OTHER = "/v1/sessions/" + "1" * 32, "/v1/sessions/" + "2" * 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of a server that signs for itself, and its key."""
    file, key = (tmp_path_factory.mktemp("tls") / name for name in ("certificate.pem", "key.pem"))
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=engine"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(file)),
        ],
        check=True,
        capture_output=True,
    )
    return file, key


@pytest.fixture(scope="module")
def server(serve: Any, folder: Path, certificate: tuple[Path, Path]) -> Any:
    """It speaks TLS, and takes little."""
    tls = [f"--ssl-certfile={certificate[0]}", f"--ssl-keyfile={certificate[1]}"]
    return serve(f"--weights-folder={folder}", "--max-request-mb=1", "--max-weights-gib=0.001", "--lease=60", *tls)


@pytest.fixture(scope="module")
def http(server: Any, certificate: tuple[Path, Path]) -> Iterator[httpx2.Client]:
    trusted = ssl.create_default_context(cafile=certificate[0])
    with httpx2.Client(base_url=server.url, timeout=120, verify=trusted) as client:
        yield client


@pytest.fixture(scope="module")
def ask(http: httpx2.Client, token_file: str) -> Callable[..., httpx2.Response]:
    """``ask("PUT", path, content=…)`` with the token."""
    token = Path(token_file).read_text().strip()

    def send(method: str, path: str, *, headers: Any = (), **body: Any) -> httpx2.Response:
        return http.request(method, path, headers={"Authorization": f"Bearer {token}", **dict(headers)}, **body)

    return send


@pytest.fixture(scope="module")
def session(ask: Any, build_model: Any) -> str:
    """The path of one that is open, with a worker for a small Qwen2."""
    opened = ask("PUT", ONE, json={"policy": Outline.of(build_model("qwen2")).to_json(), "mark": "0.0"})
    (*_, (last, _)) = wire.events([opened.content])
    assert (last["kind"], last["push"]) == ("done", True)
    return ONE


def _refused(answer: httpx2.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert len(error["message"].splitlines()) == 1
    return answer.status_code, error["code"]


# --- who may ask --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", "Basic a-token-of-the-tests", "Bearer \xe9"])
def test_a_stranger_is_refused_everywhere_but_at_health(http: httpx2.Client, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    for method, path in (
        ("GET", ENGINE),
        ("PUT", "/v1/sessions/x"),
        ("POST", "/v1/sessions/x"),
        ("DELETE", "/v1/sessions/x"),
        ("PUT", "/v1/sessions/x/weights/0"),
        ("PUT", "/v1/sessions/x/tokenizers/y"),
        ("POST", "/v1/sessions/x/generate"),
        ("GET", "/no/such/path"),
    ):
        assert _refused(http.request(method, path, headers=headers)) == (401, "token")
    assert http.get("/health", headers=headers).json() == {"status": "ok"}


def test_a_wrong_token_ends_a_run_in_one_line(
    server: Any, tmp_path: Path, token_file: str, certificate: tuple[Path, Path]
) -> None:
    other = tmp_path / "token"
    other.write_text("another-token-than-the-server's")
    fields: dict[str, Any] = {"urls": [server.url], "ca_file": str(certificate[0]), "reconnect_s": 0}
    with pytest.raises(ValueError, match=r"^the engine at https://\S+ answers 401: give the engine's token"):
        RemoteEngine(**fields, token_file=str(other)).check()
    RemoteEngine(**fields, token_file=token_file).check()


def test_a_server_that_nobody_vouches_for_is_not_sent_the_token(server: Any, token_file: str) -> None:
    with pytest.raises(EngineDied, match="certificate verify failed"):
        RemoteEngine(urls=[server.url], token_file=token_file, reconnect_s=0).check()


def test_a_web_page_is_refused(ask: Any) -> None:
    assert _refused(ask("GET", ENGINE, headers={"Origin": "http://127.0.0.1"})) == (403, "web_page")


def test_without_a_token_it_listens_to_this_machine_alone(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from grpo_pl.cli.main import main

    for host in ("127.0.0.1", "localhost", "::1"):
        ServerSettings(host=host)
    for host in ("0.0.0.0", "::", ""):
        with pytest.raises(ValueError, match="lets other machines in, and there is no token: set GRPO_PL_ENGINE_TOKEN"):
            ServerSettings(host=host)
        ServerSettings(host=host, token="x" * 16)
    monkeypatch.delenv("GRPO_PL_ENGINE_TOKEN", raising=False)
    assert main(["engine", "--host=0.0.0.0"]) == 1
    error = capsys.readouterr().err
    assert "error: host 0.0.0.0 lets other machines in" in error and len(error.strip().splitlines()) == 1


def test_tokens_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for token in ("short", " " * 20, "two words of some length", "ünïcödë-of-some-length", "a\nb-of-some-length"):
        monkeypatch.setenv("GRPO_PL_ENGINE_TOKEN", token)
        with pytest.raises(ValueError, match="must be 16 or more ASCII characters"):
            token_of(None)
    (tmp_path / "token").write_text("sixteen-or-more-characters\n")
    assert token_of(str(tmp_path / "token")) == "sixteen-or-more-characters"
    monkeypatch.delenv("GRPO_PL_ENGINE_TOKEN")
    assert token_of(None) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"urls": []}, "one or more different addresses"),
        ({"urls": ["http://a:1", "http://a:1"]}, "one or more different addresses"),
        ({"urls": ["a:8001"]}, "urls holds 'a:8001': give http://HOST:PORT"),
        ({"urls": ["http://[::1"]}, "give http://HOST:PORT"),
        ({"urls": ["http://"]}, "give http://HOST:PORT"),
        ({"urls": ["http://a:port"]}, "give http://HOST:PORT"),
        ({"urls": ["http://name:secret@a:1"]}, r"urls holds a name or password before an @: give a token_file"),
        ({"urls": ["http://a:1"], "token_file": "/no/such"}, "token_file: no such file"),
        ({"urls": ["http://a:1"], "ca_file": "/no/such"}, "ca_file: no such file"),
        ({"urls": ["http://a:1"], "weights_folder": "/no/such"}, "weights_folder: no such folder"),
        ({"urls": ["http://a:1"], "reconnect_s": -1}, "reconnect_s"),
        ({"urls": ["http://a:1"], "silence_s": 0}, "silence_s"),
    ],
)
def test_settings_of_a_run_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RemoteEngine(**fields)


def test_the_worker_inherits_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = ("GRPO_PL_ENGINE_TOKEN", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password")
    plain = ("TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "KEYBOARD")
    monkeypatch.setattr("os.environ", dict.fromkeys([*secret, *plain], "x"))
    forget_secrets()
    assert set(os.environ) == set(plain)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"port": 70000}, "port must lie in"),
        ({"lease_s": 0}, "lease-s must be positive, got 0"),
        ({"host": "no.such.host.invalid"}, "is no address of this machine"),
        ({"weights_folder": Path("/no/such")}, "no such folder"),
        ({"ssl_keyfile": Path("key")}, "without --ssl-certfile"),
        ({"ssl_certfile": Path("/no/such")}, "no such file"),
    ],
)
def test_settings_of_a_server_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerSettings(**fields)


def test_the_address_of_another_server_ends_a_run_in_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=r"cannot be reached: .* It was tried for 0 s\.$"):
            RemoteEngine(urls=[url], reconnect_s=0).check()


def test_ranks_that_share_a_server_cannot_draw_ahead(build_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_pl.rollout.remote.engine._world", lambda: 2)
    engine = RemoteEngine(urls=["http://a:1"])
    with pytest.raises(ValueError, match=r"need a server for each rank: give 2 urls, not 1"):
        engine.snapshot(build_model("qwen2"))


# --- bodies -------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = json.loads(
    wire.Request.of(
        GenerateRequest(
            prompt_ids=[[1, 2]],
            keys=[[SampleKey(seed=0, split="train", step=0, attempt=0, prompt_id=0, sample=0)]],
            sampling=SamplingParams(max_completion_length=2),
            eos_token_ids=[3],
            pad_token_id=0,
        ),
        mark="0.0",
        stops=None,
    ).encoded()
)
JSON = {"Content-Type": "application/json"}
KEY = GOOD["keys"][0][0]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"mark": NaN}',
        b'{"pad_token_id": 1' + b"0" * 10_000 + b"}",
        b"\x80\x04\x95\x00",  # a pickle's first bytes
        *(
            json.dumps({**GOOD, **change}).encode()
            for change in (
                {"mark": 0},
                {"pad_token_id": True},
                {"prompt_ids": [[1, -1]]},
                {"prompt_ids": [[37]]},
                {"prompt_ids": [[1.5]]},
                {"prompt_ids": [[1] * 128]},
                {"keys": [[{"seed": 1}]]},
                {"sampling": {"temperature": -1.0}},
                {"sampling": {"max_completion_length": 0}},
                {"pad_token_id": -1},
                {"eos_token_ids": [2**40]},
                {"stops": {"texts": ["a"]}},
                {"stops": {"texts": [], "prefix": "", "tokenizer": "b"}},
                {"sampling": {"stop_token_ids": [10**30]}},
                {"sampling": {"max_completion_length": 10**15}},
                {"sampling": {"top_k": 10**15}},
                {"sampling": {"top_logprobs": -1}},
                {"sampling": {"top_logprobs": 10**15}},
                {"prompt_ids": [], "keys": []},
                {"prompt_ids": [[]]},
                {"prompt_ids": [[1], [1]]},
                {"prompt_ids": [[1], [1]], "keys": [[KEY], [KEY, KEY]]},
                {"keys": [[]]},
                {"keys": [[{**KEY, "drawn": -5}]]},
                {"keys": [[{**KEY, "turn": -1}]]},
                {"keys": [[{**KEY, "prompt_id": 2**300}]]},
                {"worker": "os:system"},
            )
        ),
    ],
    ids=lambda body: body[:60].decode("latin-1"),
)
def test_a_request_that_is_none_is_refused(ask: Any, session: str, body: bytes) -> None:
    assert _refused(ask("POST", f"{session}/generate", content=body, headers=JSON)) == (400, "malformed")


def test_larger_bodies_than_allowed_are_refused(ask: Any, session: str) -> None:
    large = b" " * (2 << 20)
    assert _refused(ask("POST", f"{session}/generate", content=large, headers=JSON)) == (413, "too_large")
    pieces = iter([large[: 1 << 19]] * 4)  # of a length that is not said
    assert _refused(ask("POST", f"{session}/generate", content=pieces, headers=JSON)) == (413, "too_large")
    assert _refused(ask("PUT", f"{session}/weights/0", content=large)) == (413, "too_large")
    assert _refused(ask("PUT", f"{session}/weights/0", content=struct.pack(">Q", 1 << 60))) == (413, "too_large")


def test_a_bucket_that_is_announced_to_exceed_the_limit_with_those_before_it_is_not_waited_for(
    ask: Any, session: str, build_model: Any
) -> None:
    ask("PUT", session, json={"policy": Outline.of(build_model("qwen2")).to_json(), "mark": "0.0"})
    tensor = wire.framed(wire.packed({"a": torch.zeros(2**17)}))  # half of what may come
    announced = struct.pack(">Q", int(0.001 * 2**30) - len(tensor) - 8)
    for more, told in ((0, (400, "broke_off")), (1, (413, "too_large"))):  # the last one that fits, and one more byte
        size = struct.pack(">Q", *(number + more for number in struct.unpack(">Q", announced)))
        assert _refused(ask("PUT", f"{session}/weights/0", content=tensor + size)) == told


def test_what_names_no_session_of_its_own_is_refused(ask: Any, session: str) -> None:
    for method, path in (("POST", ""), ("PUT", "/weights/0"), ("POST", "/generate")):
        assert _refused(ask(method, f"{OTHER}{path}", content=b"{}", headers=JSON)) == (409, "lost")
    policy = {"policy": {"config": {"model_type": "qwen2"}, "dtype": "float32"}, "mark": "0.0"}
    assert _refused(ask("PUT", OTHER, json=policy)) == (409, "in_use")
    assert ask("DELETE", OTHER).status_code == 200
    assert ask("POST", session).status_code == 200  # which another's farewell does not end
    assert _refused(ask("GET", ONE)) == (405, "no_route")
    for name in ("one", "1" * 33, "A" * 32, "1" * 31 + "%0a"):
        assert _refused(ask("POST", f"/v1/sessions/{name}")) == (400, "malformed")
    assert _refused(ask("GET", "/v1/../etc")) == (404, "no_route")


@pytest.mark.parametrize("tokenizer", [None, "", "{}", "[1]", "x" * 100])
def test_a_tokenizer_that_is_none_is_refused(ask: Any, session: str, tokenizer: Any) -> None:
    body = {"tokenizer": tokenizer, "clean_up": False}
    name = wire.tokenizer_name(str(tokenizer), False)
    assert _refused(ask("PUT", f"{session}/tokenizers/{name}", json=body)) == (400, "malformed")
    assert _refused(ask("PUT", f"{OTHER}/tokenizers/{name}", json=body)) == (409, "lost")


def test_a_tokenizer_goes_by_its_digest(ask: Any, session: str, tokenizer: Any) -> None:
    body = {"tokenizer": tokenizer.backend_tokenizer.to_str(), "clean_up": False}
    assert _refused(ask("PUT", f"{session}/tokenizers/a", json=body)) == (400, "malformed")
    name = wire.tokenizer_name(body["tokenizer"], False)
    assert ask("PUT", f"{session}/tokenizers/{name}", json=body).status_code == 200


def test_the_server_answers_others_while_it_reads_a_large_request(ask: Any, session: str, http: Any) -> None:
    """A megabyte of empty lists, which is refused before it is looked through."""
    body = json.dumps({**GOOD, "prompt_ids": [[]] * 250_000}).encode()
    assert _refused(ask("POST", f"{session}/generate", content=body, headers=JSON)) == (400, "malformed")
    assert http.get("/health").status_code == 200


def test_stop_strings_of_a_tokenizer_that_was_not_sent(ask: Any, session: str) -> None:
    asked = {**GOOD, "stops": {"texts": ["a"], "prefix": "", "tokenizer": "b"}}
    assert _refused(ask("POST", f"{session}/generate", json=asked)) == (409, "tokenizer")


@pytest.mark.parametrize(
    "policy",
    [
        None,
        {},
        {"config": {"model_type": "no_such"}, "dtype": "float32"},
        {"config": {"model_type": "qwen2"}},
        {"config": {"model_type": "qwen2", "architectures": ["os"]}, "dtype": "float32"},
        {"config": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "dtype": "float32"},  # 28 GiB
    ],
    ids=str,
)
def test_a_policy_that_is_none_is_refused(ask: Any, session: str, policy: Any) -> None:
    answer = ask("PUT", session, json={"policy": policy, "mark": "0.0"})
    if policy is None:
        assert _refused(answer) == (400, "malformed")
    else:
        (*_, (last, _)) = wire.events([answer.content])
        assert (last["kind"], last["error"]) == ("error", "refused") and "policy" in last["message"]


# --- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "broke_off"),
        (b"\0\0\0", "broke_off"),
        (wire.framed(b"no safetensors") + wire.framed(b""), "malformed"),
        (wire.framed(b"\xff" * 64) + wire.framed(b""), "malformed"),
        (wire.framed(struct.pack("<Q", 1 << 62) + b"{}") + wire.framed(b""), "malformed"),
        (wire.framed(b""), "malformed"),
        (wire.framed(wire.packed({"a": torch.zeros(2)}))[:-3], "broke_off"),
        (wire.framed(b"") + b"more", "malformed"),
    ],
)
def test_a_push_that_is_none_or_breaks_off_leaves_nothing_to_draw_from(
    ask: Any, session: str, build_model: Any, body: bytes, code: str
) -> None:
    ask("PUT", session, json={"policy": Outline.of(build_model("qwen2")).to_json(), "mark": "0.0"})
    assert _refused(ask("PUT", f"{session}/weights/0", content=body)) == (400, code)
    (*_, (last, _)) = wire.events([ask("POST", f"{session}/generate", json=GOOD).content])
    assert (last["kind"], last["error"]) == ("error", "lost")


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "link", "folder", "folder/w", "", "no_such", "a\0b", "loop", ".", "..", "pipe"]
)
def test_no_file_outside_of_the_folder_is_read(ask: Any, session: str, folder: Path, tmp_path: Path, name: str) -> None:
    (folder.parent / "secret").write_bytes(wire.packed({"a": torch.zeros(2)}))
    for link, target in (("link", folder.parent / "secret"), ("loop", folder / "loop")):
        (folder / link).unlink(missing_ok=True)
        (folder / link).symlink_to(target)
    (folder / "folder").mkdir(exist_ok=True)
    (folder / "folder/w").write_bytes(wire.packed({"a": torch.zeros(2)}))
    if not (folder / "pipe").exists():
        os.mkfifo(folder / "pipe")
    code = "malformed" if name == "" else "no_file"
    assert _refused(ask("PUT", f"{session}/weights/0", json={"files": [name]})) == (400, code)
    assert _refused(ask("PUT", f"{session}/weights/0", json={"files": name})) == (400, "malformed")


def test_files_that_hold_no_weights_are_an_error_of_the_push(
    ask: Any, session: str, build_model: Any, folder: Path
) -> None:
    ask("PUT", session, json={"policy": Outline.of(build_model("qwen2")).to_json(), "mark": "0.0"})
    (folder / "broken").write_bytes(b"no safetensors")
    (*_, (last, _)) = wire.events([ask("PUT", f"{session}/weights/0", json={"files": ["broken"]}).content])
    assert (last["kind"], last["error"]) == ("error", "refused") and len(last["message"].splitlines()) == 1
    (folder / "large").write_bytes(wire.packed({"a": torch.zeros(2**19)}))
    assert _refused(ask("PUT", f"{session}/weights/0", json={"files": ["large"]})) == (400, "malformed")
    assert _refused(ask("PUT", f"{session}/weights/0", json={"files": ["broken"] * 10_001})) == (400, "malformed")


def test_a_file_that_is_replaced_or_cut_after_the_check_is_not_read(tmp_path: Path) -> None:
    folder, secret = tmp_path / "weights", tmp_path / "secret"
    folder.mkdir()
    for file in (secret, folder / "w"):
        file.write_bytes(wire.packed({"a": torch.ones(2)}))
    files = WeightFiles(folder=folder, names=["w"], limit=2**20)
    files.check()
    assert [name for name, _ in files.read(lambda: False)] == ["a"]
    (folder / "w").write_bytes(secret.read_bytes()[:-3])
    with pytest.raises(wire.Malformed, match="no safetensors"):
        list(files.read(lambda: False))
    (folder / "w").unlink()
    (folder / "w").symlink_to(secret)
    with pytest.raises(NoFile):
        list(files.read(lambda: False))
    (folder / "w").unlink()
    (folder / "w").write_bytes(wire.packed({"a": torch.ones(2**20)}))
    with pytest.raises(wire.Malformed, match="larger than"):
        list(files.read(lambda: False))


def test_a_bucket_that_many_tensors_make_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BUCKET_BYTES", 1000)
    one, two = (wire.framed(wire.packed({str(n): torch.ones(1000) for n in range(count)})) for count in (1, 2))
    wire.check_bucket(bytearray(one), len(one) - wire.LENGTH_BYTES)
    with pytest.raises(wire.Malformed, match="holds more than one tensor"):
        wire.check_bucket(bytearray(two), len(two) - wire.LENGTH_BYTES)
    wire.check_bucket(bytearray(two[:12]), len(two))  # nothing can be said yet


# --- strangers ----------------------------------------------------------------------------------------------------


def test_strangers_cannot_take_up_the_server(server: Any, http: httpx2.Client, certificate: tuple[Path, Path]) -> None:
    trusted = ssl.create_default_context(cafile=certificate[0])

    def connect() -> socket.socket:
        plain = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        return trusted.wrap_socket(plain, server_hostname="127.0.0.1")

    with connect() as large:
        with contextlib.suppress(OSError):
            large.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * (1 << 20))
        with contextlib.suppress(OSError):
            assert large.recv(100).split(b" ")[1:2] in ([b"431"], [])
    idle = [connect() for _ in range(300)]
    assert httpx2.get(f"{server.url}/health", verify=trusted, timeout=30).status_code == 200
    for one in idle:
        one.close()


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pieces",
    [
        [b"<html>"],
        [b"<html>\n"],
        [b"[]\n"],
        [b'{"kind": "done"}\n'],
        [b'{"kind": "done", "bytes": 10}\n', b"123"],
        [b'{"kind": 1, "bytes": 0}\n'],
        [b"[" * 100_000 + b"\n"],
    ],
    ids=str,
)
def test_the_answer_of_something_else_is_refused(pieces: list[bytes]) -> None:
    with pytest.raises(wire.Malformed):
        list(wire.events(pieces))


def test_likely_tokens_that_do_not_fit_the_rollout_are_refused() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    noted = {"top_ids": torch.zeros(2, 3, 4, dtype=torch.int32), "top_logprobs": torch.zeros(2, 3, 4)}
    whole = Rollout(
        group_size=1,
        prompt_ids=ids,
        prompt_mask=ids > 0,
        completion_ids=ids,
        completion_mask=ids > 0,
        sampling_logprobs=torch.zeros(2, 3),
        finish_reasons=["stop", "length"],
        **noted,
    )
    back, _ = wire.rollout_of(*wire.rollout_parts(whole, "0.0"), rows=2, top=True)
    assert all(torch.equal(getattr(back, name), tensor) for name, tensor in noted.items())
    none = wire.rollout_parts(replace(whole, top_ids=None, top_logprobs=None), "0.0")
    assert wire.rollout_of(*none, rows=2)[0].top_ids is None
    with pytest.raises(wire.Malformed, match="records no likeliest tokens"):
        wire.rollout_of(*none, rows=2, top=True)
    for change in (
        {"top_ids": noted["top_ids"].long()},
        {"top_ids": noted["top_ids"][:, :2]},
        {"top_ids": noted["top_ids"][:, :2], "top_logprobs": noted["top_logprobs"][:, :2]},
        {"top_ids": noted["top_ids"][..., 0], "top_logprobs": noted["top_logprobs"][..., 0]},
        {"top_ids": None},
    ):
        with pytest.raises(wire.Malformed):
            wire.rollout_of(*wire.rollout_parts(replace(whole, **change), "0.0"), rows=2)


def test_an_answer_is_read_however_it_is_cut() -> None:
    sent = wire.event("progress", tokens=3) + wire.event("done", b"\n{}\n", version=1) + wire.event("last")
    whole = list(wire.events([sent]))
    assert [head["kind"] for head, _ in whole] == ["progress", "done", "last"] and whole[1][1] == b"\n{}\n"
    for size in (1, 3, 7):
        assert list(wire.events(sent[at : at + size] for at in range(0, len(sent), size))) == whole
