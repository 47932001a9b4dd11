"""The smaller routes: models, tokens, and the description of them all."""

from pathlib import Path
from typing import Any

import openai
import pytest

from grpo_pl.policy.trained import find_model


def test_one_model_is_described(server: Any, client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    assert client.models.retrieve("tiny") == listed
    assert server.call("GET", "/v1/models/tiny")[1]["max_model_len"] == 4096
    status, answer, _ = server.call("GET", "/v1/models/org/other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_texts_become_tokens_and_come_back(server: Any, export: Path) -> None:
    model = find_model(export)
    answer = server.ask("/tokenize", {"model": "tiny", "prompt": "12+\n<think>", "return_token_strs": True})
    ids = model.tokenizer("12+\n<think>").input_ids
    assert answer == {
        "count": len(ids),
        "max_model_len": 4096,
        "tokens": ids,
        "token_strs": model.tokenizer.convert_ids_to_tokens(ids),
    }
    assert server.post("/detokenize", {"model": "tiny", "tokens": ids}) == (200, {"prompt": "12+\n<think>"})
    chat = [{"role": "user", "content": "12+34="}]
    tokens = server.post("/tokenize", {"messages": chat, "add_generation_prompt": True})[1]["tokens"]
    assert tokens == model.template.encode("12+34=", model.tokenizer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "\N{GREEK SMALL LETTER PI}"}),
        ("/tokenize", {"prompt": "x" * 200_000}),
        ("/tokenize", {"promt": "x"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {"tokens": [0] * 200_000}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_token_routes_refuse_nonsense(server: Any, path: str, body: dict[str, Any]) -> None:
    server.refusal(path, body)
