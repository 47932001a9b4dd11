"""inspect-ai, with its provider for servers like OpenAI's."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.clients
pytest.importorskip("inspect_ai")

from inspect_ai import Task, eval  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model  # noqa: E402
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.solver import generate, use_tools  # noqa: E402
from inspect_ai.tool import Tool, tool  # noqa: E402
from inspect_ai.util import json_schema  # noqa: E402
from pydantic import BaseModel  # noqa: E402

SAMPLES = [Sample(input=f"{i}+{i}=", target=str(2 * i)) for i in range(4)]
MODEL = "openai-api/local/tiny"
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def sums():
    samples = [Sample(input=f"{i}+{i}=", target=str(2 * i)) for i in range(4)]
    return Task(dataset=samples, solver=generate(), scorer=includes())
"""


class Sum(BaseModel):
    right: bool


@tool
def double() -> Tool:
    async def execute(number: int) -> int:
        """Doubles a number.

        Args:
            number: what is doubled.
        """
        return 2 * number

    return execute


@pytest.fixture
def evaluate(base_url: str, key: str, tmp_path: Path) -> Callable[..., Any]:
    """``evaluate(solver, key=…, **settings of generation)``: the log."""

    def run(*solver: Any, key: str = key, seed: int = 3, **settings: Any) -> Any:
        model = get_model(
            MODEL, base_url=base_url, api_key=key, memoize=False, config=GenerateConfig(seed=seed, **settings)
        )
        task = Task(dataset=SAMPLES, solver=list(solver), scorer=includes(), message_limit=4)
        (log,) = eval(task, model=model, display="none", log_dir=str(tmp_path), score=False, max_retries=0)
        return log

    return run


def test_the_command_evaluates_a_task(base_url: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASK)
    command = [str(Path(sys.executable).with_name("inspect")), "eval", "tasks.py", "--model", MODEL, "--max-tokens"]
    done = subprocess.run(
        [*command, "64", "--seed", "3", "--display", "plain", "--log-format", "json", "--log-dir", "logs"],
        cwd=tmp_path,
        env=os.environ | {"LOCAL_BASE_URL": base_url, "LOCAL_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (log,) = (tmp_path / "logs").glob("*.json")
    told = json.loads(log.read_text())
    assert told["status"] == "success" and len(told["samples"]) == 4
    assert all(sample["output"]["choices"][0]["message"]["content"] for sample in told["samples"])


def test_settings_of_generation_hold(evaluate: Callable[..., Any]) -> None:
    log = evaluate(generate(), max_tokens=16, temperature=0.5, stop_seqs=["?"], logprobs=True, top_logprobs=2)
    assert log.status == "success" and len(log.samples) == 4
    for sample in log.samples:
        (choice,) = sample.output.choices
        assert 0 < len(choice.logprobs.content) == sample.output.usage.output_tokens <= 16
        assert "?" not in choice.message.text


def test_answers_follow_a_schema(evaluate: Callable[..., Any]) -> None:
    schema = ResponseSchema(name="sum", json_schema=json_schema(Sum))
    log = evaluate(generate(), max_tokens=200, response_schema=schema)
    assert log.status == "success"
    assert all(Sum.model_validate_json(sample.output.completion) for sample in log.samples)


def test_tools_are_called_and_their_results_answered(evaluate: Callable[..., Any]) -> None:
    log = evaluate(use_tools(double(), tool_choice="any"), generate(), max_tokens=300, parallel_tool_calls=False)
    assert log.status == "success"
    roles = [[message.role for message in sample.messages] for sample in log.samples]
    assert roles == [["user", "assistant", "tool", "assistant"]] * 4
    for sample in log.samples:
        (call,) = sample.messages[1].tool_calls
        assert int(sample.messages[2].text) == 2 * call.arguments["number"]


@pytest.mark.parametrize(
    ("change", "reason"), [({"key": "wrong"}, "API key"), ({"temperature": -1.0}, "temperature")], ids=str
)
def test_a_refusal_ends_the_evaluation_with_its_reason(
    evaluate: Callable[..., Any], change: dict[str, Any], reason: str
) -> None:
    log = evaluate(generate(), **change)
    assert log.status == "error" and reason in log.error.message
