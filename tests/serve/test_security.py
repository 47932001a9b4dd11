"""The boundaries of SECURITY.md, walked one by one: what is not trusted runs nothing and learns nothing."""

import ast
import asyncio
import base64
import json
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from grpo_pl.cli.main import main
from grpo_pl.config.objects import build_rewards
from grpo_pl.data.tables import TablePrompts
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.trained import find_model
from grpo_pl.rewards import MathReward
from grpo_pl.rewards.base import MissingColumn
from serve import PolicyAPI, RewardAPI
from serve.middleware import middlewares
from serve.settings import ServeSettings
from tests.serve.conftest import SECRETS, altered

ROOT = Path(__file__).parents[2]
MATH = {"class_path": "grpo_pl.rewards.MathReward", "init_args": {"workers": 1}}
GYM = {"class_path": "grpo_pl.rewards.ReasoningGymReward", "init_args": {"workers": 1, "correctness": True}}


class _Touch:
    """Unpickled, it leaves a file behind."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.file,))


def _bomb(file: Path) -> str:
    return base64.b64encode(pickle.dumps(_Touch(file))).decode()


def _variables(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _holds_no_secret(pid: int) -> bool:
    return not any("secret-" in value for value in _variables(pid).values())


# --- data rows and clients --------------------------------------------------------------------------------------------


RUNS_PROGRAMS = ROOT / "grpo_pl/extras/code/program_run.py"
"""What runs the programs that CodeReward judges, in isolation: see tests/extras/code."""


@pytest.mark.parametrize("folder", ["grpo_pl/rewards", "grpo_pl/data", "serve"])
def test_nothing_that_data_reaches_can_unpickle_or_evaluate(folder: str) -> None:
    modules = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert modules.isdisjoint(name.split(".")[0] for name in names), file
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if file == RUNS_PROGRAMS:
                    continue
                assert called not in ("eval", "exec", "compile", "__import__"), (file, node.lineno)
                assert called not in ("torch.load", "yaml.load", "yaml.unsafe_load"), (file, node.lineno)


def test_nothing_is_left_to_import_for_the_first_chat(server: Any) -> None:
    """So it takes no longer than later ones. No boundary: the server is started as users do, which takes long."""
    assert server.imports.count("torch") >= 2  # the front and the process with the model
    assert server.late_imports == []


def test_a_pickle_from_a_client_is_refused_and_does_nothing(mixed: Any, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    file = tmp_path / "touched"
    item = {"completion": r"\boxed{1}", "answer": "1", "source": "zebras", "completion_length": 1}
    error = mixed.refusal("/v1/score", {"items": [{**item, "reasoning_gym": _bomb(file)}]})
    assert error["code"] == "missing_column"
    assert "'reasoning_gym'" in error["message"]
    assert not file.exists()
    assert mixed.call("GET", "/ready")[0] == 200


def _check_family(server: Any, *, spawned: int, sandboxes: int) -> None:
    """None of the server's workers, nor their children, holds a secret."""
    workers = [server.worker("generate"), server.worker("score")]
    family = [*workers, *(child for worker in workers for child in worker.children(recursive=True))]
    names = {process.pid: " ".join(process.cmdline()) for process in family}
    assert sum("spawn_main" in name for name in names.values()) >= spawned
    assert sum("rewards.sandbox.worker" in name for name in names.values()) >= sandboxes
    for pid, name in names.items():
        if "resource_tracker" not in name:
            assert _holds_no_secret(pid), name


def test_no_worker_of_the_server_knows_a_secret(server: Any) -> None:
    assert not _holds_no_secret(server.process.pid)  # the check itself works
    _check_family(server, spawned=2, sandboxes=1)


def test_no_worker_knows_the_key_of_the_server(mixed: Any, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers are forks here, so what they would be started with is looked at; their sandboxes are not."""
    pytest.importorskip("reasoning_gym")
    _check_family(mixed, spawned=0, sandboxes=2)  # for mathematics and for reasoning-gym
    for name, value in (SECRETS | {"GRPO_PL_API_KEY": "secret-server", "HTTPS_PROXY": ""}).items():
        monkeypatch.setenv(name, value)
    for lit_api in (PolicyAPI(export), RewardAPI(export)):
        told = lit_api.environment()
        assert "PATH" in told and "HTTPS_PROXY" not in told
        assert not any("secret-" in value for value in told.values())


@pytest.mark.slow
def test_nor_does_any_of_a_server_that_is_started_as_users_do(
    start: Callable[..., Any], mixed_export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("reasoning_gym")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    keyed = start(model=mixed_export, api_key="secret-server", interpreter=("-X", "importtime"))
    assert "GRPO_PL_API_KEY" in _variables(keyed.process.pid)
    _check_family(keyed, spawned=2, sandboxes=2)


def test_a_pickle_in_a_file_to_score_is_refused_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("reasoning_gym")
    file, rows, config = tmp_path / "touched", tmp_path / "rows.jsonl", tmp_path / "rewards.yaml"
    rows.write_text(json.dumps({"completion": r"\boxed{1}", "answer": "1", "reasoning_gym": _bomb(file)}) + "\n")
    config.write_text(yaml.safe_dump({"rewards": [GYM]}))
    assert main(["score", str(rows), f"--config={config}"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("grpo-pl score: error: reward 'reasoning_gym': the column 'reasoning_gym' holds no problem")
    assert not file.exists()


def test_a_pickle_in_a_table_is_refused_and_does_nothing(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    file, rows = tmp_path / "touched", tmp_path / "rows.jsonl"
    row = {"question": "1?", "answer": "1", "reasoning_gym": _bomb(file)}
    rows.write_text("".join(json.dumps({**row, "question": f"{i}?"}) + "\n" for i in range(40)))
    (prompt,) = TablePrompts(path=str(rows)).prompts(0, count=1)
    (reward,) = build_rewards([GYM])
    with pytest.raises(MissingColumn, match="holds no problem"):
        reward([r"\boxed{1}"], ["1"], {name: [cell] for name, cell in prompt.columns.items()})
    assert not file.exists()


def test_a_worker_started_in_python_knows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    for spec in (MATH, GYM):
        (reward,) = build_rewards([{**spec, "init_args": {**spec["init_args"], "memory_limit_mb": 2049}}])
        reward.start()
        assert reward.pool.pids  # type: ignore[attr-defined]
        for pid in reward.pool.pids:  # type: ignore[attr-defined]
            assert _holds_no_secret(pid)
            assert SECRETS.keys().isdisjoint(_variables(pid))
        reward.close()


# --- exports and run folders ------------------------------------------------------------------------------------------


def _hostile(kind: str, folder: Path) -> tuple[dict[str, Any], str]:
    """A reward that leaves a file behind when its code is imported, and the name that a refusal must show."""
    code = folder / "hostile_reward.py"
    code.write_text(f"open({str(folder / 'touched')!r}, 'w')\ndef f(completions): return [1.0] * len(completions)\n")
    function = {"class_path": "grpo_pl.rewards.FunctionReward", "init_args": {"function": f"{code}:f"}}
    exact = {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}}
    per_source = "grpo_pl.rewards.PerSource"
    judge = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "api_key_variable": "HF_TOKEN", "correctness": True}
    return {
        "function": (function, "FunctionReward"),
        "function by its module": ({**function, "class_path": "grpo_pl.rewards.function.FunctionReward"}, "function."),
        "inside": ({"class_path": per_source, "init_args": {"rewards": {"a": exact, "b": function}}}, "FunctionReward"),
        "judge": ({"class_path": "grpo_pl.rewards.JudgeReward", "init_args": judge}, "JudgeReward"),
        "model": ({"class_path": "grpo_pl.rewards.ModelReward", "init_args": {"model": "a/b"}}, "ModelReward"),
        "steps": ({"class_path": "grpo_pl.rewards.ProcessModelReward", "init_args": {"model": "a/b"}}, "ProcessModel"),
        "elsewhere": ({"class_path": "hostile_reward.f"}, "hostile_reward.f"),
        "the system": ({"class_path": "os.system", "init_args": {"command": "true"}}, "os.system"),
    }[kind]


KINDS = ["function", "function by its module", "inside", "judge", "model", "steps", "elsewhere", "the system"]


@pytest.mark.parametrize(
    ("verb", "kind"), [("serve", kind) for kind in KINDS] + [(v, "inside") for v in ("evaluate", "predict", "filter")]
)
def test_an_export_that_names_other_code_is_refused_before_anything_is_imported(
    verb: str,
    kind: str,
    export: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reward, shown = _hostile(kind, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    folder = altered(export, tmp_path / "export", rewards=[MATH, reward])
    data, config = tmp_path / "problems.jsonl", tmp_path / "source.yaml"
    data.write_text('{"problem": "1+1=", "answer": "2"}\n')
    sums = {"class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts", "init_args": {"digits": 1}}
    config.write_text(yaml.safe_dump({"data": {"source": sums}}))
    options = {
        "evaluate": [f"--data={data}", f"--output={tmp_path / 'out'}"],
        "predict": [f"--config={config}", f"--output={tmp_path / 'out'}"],
        "filter": [f"--config={config}", f"--output={tmp_path / 'out'}", "--prompts=2"],
        "serve": [],
    }[verb]
    assert main([verb, f"--model={folder}", *options]) == 1
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert shown in error
    assert "--trust-rewards" in error
    assert not (tmp_path / "touched").exists()
    assert "hostile_reward" not in sys.modules


def test_somebody_who_knows_the_author_may_let_it_run(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward, _ = _hostile("function", tmp_path)
    folder = altered(export, tmp_path / "export", rewards=[MATH, reward])
    data, output = tmp_path / "problems.jsonl", tmp_path / "out.jsonl"
    data.write_text('{"problem": "1+1=", "answer": "2"}\n')
    options = [f"--data={data}", f"--output={output}", "--n=2", "--max-completion-length=4"]
    assert main(["evaluate", f"--model={folder}", *options, "--trust-rewards"]) == 0, capsys.readouterr().err
    assert (tmp_path / "touched").exists()
    assert output.exists()
    model = find_model(folder, trust_rewards=True)
    assert [r.name for r in build_rewards(model.rewards, trust_rewards=True)] == ["math", "function"]
    for refuse in (lambda: find_model(folder), lambda: build_rewards(model.rewards)):
        with pytest.raises(ValueError, match=r"FunctionReward.*--trust-rewards"):
            refuse()


@pytest.mark.slow
def test_the_server_process_refuses_as_well(export: Path, tmp_path: Path) -> None:
    reward, _ = _hostile("function", tmp_path)
    folder = altered(export, tmp_path / "export", rewards=[MATH, reward])
    command = [sys.executable, "-m", "serve", "--model", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "FunctionReward" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "touched").exists()


def test_a_run_that_names_another_source_or_reward_is_refused(
    export: Path, tmp_path: Path, shape: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hostile_source.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')\n")
    run = tmp_path / "run"
    shutil.copytree(export, run / "export")
    model = {"policy": {"from_scratch": shape}, "rewards": [MATH]}
    for source in ({"class_path": "hostile_source.Mine"}, "hostile_source.Mine"):
        (run / "config.yaml").write_text(yaml.safe_dump({"model": model, "data": {"source": source}}))
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(tmp_path)
            assert main(["predict", f"--model={run}", f"--output={tmp_path / 'out'}"]) == 1
        assert "hostile_source.Mine" in capsys.readouterr().err
    shutil.rmtree(run / "export")
    (run / "checkpoints").mkdir()
    torch.save({"state_dict": {}}, run / "checkpoints" / "last.ckpt")
    reward, shown = _hostile("function", tmp_path)
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {**model, "rewards": [MATH, reward]}}))
    for folder in (run, run / "checkpoints" / "last.ckpt"):
        with pytest.raises(ValueError, match=shown):
            find_model(folder)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "hostile.Model", "AutoConfig": "hostile.Config"}}),
        ("config.json", {"attn_implementation": "somebody/kernel"}),
        ("config.json", {"_attn_implementation": "somebody/kernel:f"}),
        ("adapter_config.json", {"megatron_config": {"a": 1}, "megatron_core": "hostile"}),
        ("adapter_config.json", {"auto_mapping": {"parent_library": "hostile", "base_model_class": "X"}}),
    ],
)
def test_settings_that_name_code_are_refused(export: Path, tmp_path: Path, file: str, settings: dict[str, Any]) -> None:
    folder = tmp_path / "export"
    shutil.copytree(export, folder)
    known = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps({**known, **settings}))
    with pytest.raises(ValueError, match=r"--trust-rewards"):
        find_model(folder)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"model_type": "qwen2"}, False),
        ({"auto_map": {"AutoModelForCausalLM": "hostile.Model"}}, True),
        ({"attn_implementation": "somebody/kernel"}, True),
        (None, True),  # not here, so nobody can check it
    ],
)
def test_the_base_of_adapters_on_the_hub_is_checked_like_a_folder(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any] | None, refused: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    commit, cached = "0" * 40, tmp_path / "hub" / "models--somebody--base"
    if config is not None:
        for file, text in (("refs/main", commit), (f"snapshots/{commit}/config.json", json.dumps(config))):
            (cached / file).parent.mkdir(parents=True)
            (cached / file).write_text(text)
    folder = tmp_path / "export"
    shutil.copytree(export, folder)
    settings = {"peft_type": "LORA", "base_model_name_or_path": "somebody/base"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    if refused:
        with pytest.raises(ValueError, match=r"somebody/base.*--trust-rewards"):
            find_model(folder)
    assert refused or find_model(folder).source == folder
    assert find_model(folder, trust_rewards=True).source == folder


def test_a_tokenizer_brings_no_code(export: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(export, folder)
    (folder / "hostile.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')\n")
    file = folder / "tokenizer_config.json"
    settings = {
        **json.loads(file.read_text()),
        "tokenizer_class": "Mine",
        "auto_map": {"AutoTokenizer": ["hostile.Mine"] * 2},
    }
    file.write_text(json.dumps(settings))
    try:
        load_tokenizer(PolicyConfig(path=str(folder)))
    except ValueError as error:
        assert "cannot load the tokenizer" in str(error)
    assert not (tmp_path / "touched").exists()


def test_weights_are_never_unpickled(export: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(export, folder)
    (folder / "model.safetensors").unlink()
    torch.save({"bomb": _Touch(tmp_path / "touched")}, folder / "pytorch_model.bin")
    policy = PolicyConfig(path=str(folder))
    with pytest.raises(ValueError, match="safetensors"):
        load_model(policy, load_tokenizer(policy))
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__['os'].system('true') }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_chat_template_runs_in_a_sandbox(export: Path, template: str) -> None:
    from jinja2.exceptions import SecurityError, UndefinedError

    tokenizer = load_tokenizer(PolicyConfig(path=str(export)))
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="the chat template") as refused:
        PromptTemplate().render("1+1=", tokenizer)
    assert isinstance(refused.value.__cause__, SecurityError | UndefinedError)


def test_the_page_names_what_holds_each_boundary() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    shown = ("FunctionReward", "JudgeReward", "ModelReward", "ProcessModelReward", "--trust-rewards", "weights_only")
    files = ("grpo_pl/rewards/trust.py", "grpo_pl/processes/variables.py", "tests/serve/test_security.py")
    assert [name for name in (*shown, *files) if name not in page] == []
    assert all((ROOT / file).is_file() for file in files)
    assert MathReward.__name__ not in page  # what loads by itself is listed in one place


COOKIES = {
    "quotes": 'grpo_pl_1="' + '\\"' * 30_000 + '"',
    "octal": 'a="' + "\\012" * 15_000 + '"',
    "backslashes": 'a="' + "\\" * 60_000 + '"',
    "names": "a=1;" * 15_000,
    "signs": "=" * 60_000,
}


@pytest.mark.parametrize("cookie", COOKIES.values(), ids=COOKIES)
def test_a_large_cookie_costs_next_to_nothing_before_the_key_is_checked(cookie: str) -> None:
    settings, layers = ServeSettings(model=Path("x"), api_key="k"), _no_app
    for layer, options in middlewares(settings, lambda *_: None):
        layers = layer(layers, **options)
    headers = [(b"host", b"localhost"), (b"cookie", cookie.encode())]
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers, "scheme": "http"}
    scope |= {"raw_path": b"/v1/models", "query_string": b""}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    began = time.process_time()
    asyncio.run(layers(scope, _no_app, send))
    assert time.process_time() - began < 0.5
    assert sent[0]["status"] == 401


async def _no_app(*_: Any) -> Any:
    raise AssertionError("nothing is handed on")
