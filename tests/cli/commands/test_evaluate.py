"""``grpo-pl evaluate``: what is refused before the first question is asked. Its results are tested with the server."""

from pathlib import Path
from typing import Any

import pytest

from grpo_pl.cli.commands.evaluate import evaluate


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"output": "problems.jsonl"}, "output problems.jsonl is the input file"),
        ({"limit": 0}, "--limit must be at least 1, got 0"),
        ({"max_batch_size": -4}, "--max_batch_size must be at least 1, got -4"),
        ({"n": 99}, r"^--n: Input should be less than or equal to 64\.$"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(
    given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = '{"problem": "1+1=", "answer": "2"}\n'
    Path("problems.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        evaluate(data="problems.jsonl", model="not asked for", **given)
    assert Path("problems.jsonl").read_text() == text
