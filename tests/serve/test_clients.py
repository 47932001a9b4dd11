"""Other people's programs that measure models, unchanged, against a real server; each is looked for in
``$GRPO_PL_CLIENTS`` and ``$PATH``. Clients of the OpenAI API are in ``clients/``.

Install each into an environment of its own, because their requirements differ from ours, and name the folders of
their programs:

    python -m venv lm && lm/bin/pip install 'lm-eval[api]' transformers
    python -m venv llm && llm/bin/pip install guidellm
    GRPO_PL_CLIENTS=lm/bin:llm/bin pytest -m slow tests/serve/test_clients.py
"""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)


def _program(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("GRPO_PL_CLIENTS", "") + os.pathsep + os.environ["PATH"])
    if found is None:
        pytest.skip(f"{name} is not installed: see the head of this file")
    return found


def _run(command: str, folder: Path, **environment: str) -> str:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "PYTHONPATH": ""}
    done = subprocess.run(
        shlex.split(command),
        cwd=folder,
        env=os.environ | offline | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["generate_until", "multiple_choice"])
def test_lm_eval(server: Any, export: Path, tmp_path: Path, kind: str) -> None:
    """One task that generates, one that compares log-likelihoods."""
    program = _program("lm_eval")
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i), "choices": [str(2 * i), str(i)]} for i in range(1, 7)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task: dict[str, Any] = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}" if kind == "generate_until" else 0,
    }
    if kind == "generate_until":
        task["generation_kwargs"] = {"until": ["\n"], "do_sample": False, "max_gen_toks": 12}
        task["metric_list"] = [{"metric": "exact_match"}]
    else:
        task["doc_to_choice"] = "choices"
        task["metric_list"] = [{"metric": "acc"}]
    (tmp_path / "sums.yaml").write_text(json.dumps(task))  # JSON is YAML
    where = f"model=tiny,base_url={server.address}/v1/completions,tokenizer={export},num_concurrent=2,max_length=512"
    out = tmp_path / "out"
    _run(
        f"{program} --model local-completions --model_args {where} --include_path {tmp_path} --tasks sums"
        f" --output_path {out}",
        tmp_path,
    )
    (result,) = out.rglob("results_*.json")
    metrics = json.loads(result.read_text())["results"]["sums"]
    assert 0.0 <= metrics["exact_match,none" if kind == "generate_until" else "acc,none"] <= 1.0


@pytest.mark.slow
def test_guidellm(server: Any, export: Path, tmp_path: Path) -> None:
    program = _program("guidellm")
    rows = [{"prompt": f"{i}+{i}=", "output_tokens_count": 12} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _run(
        f"{program} run --backend kind=openai_http,target={server.address},model=tiny"
        f" --profile kind=concurrent,streams=2 --constraint kind=max_requests,count=6"
        f" --tokenizer kind=hf_auto,model={export} --data kind=json_file,path={tmp_path / 'rows.jsonl'}"
        f" --output kind=json,path={tmp_path / 'report.json'} --disable-console",
        tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 6, totals
    assert totals["errored"] == 0
