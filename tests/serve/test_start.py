"""A server without a package that it can do without."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.bodies import CHAT

ASK = {"messages": [{"role": "user", "content": "12+34="}], "max_tokens": 8}


@pytest.fixture(scope="module")
def server(start: Callable[..., Any]) -> Any:
    """One without llguidance."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "llguidance", None)  # as if not installed
        return start()


def test_structured_outputs_without_llguidance_are_refused_by_what_to_install(server: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    for change in (
        {"response_format": {"type": "json_object"}},
        {"response_format": schema},
        {"structured_outputs": {"regex": "a+"}},
        {"structured_outputs": {"choice": ["a"]}, "stream": True},
    ):
        error = server.refusal(CHAT, ASK | change)
        assert error["code"] == "unsupported_parameter"
        assert error["param"] == next(iter(change)) and "pip install 'grpo_pl[structured]'" in error["message"]
    server.ask(CHAT, ASK | {"response_format": {"type": "text"}})
    assert "Traceback" not in server.log
