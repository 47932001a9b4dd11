"""What a server has done when it says that it is ready, and what it says of a package that is not there."""

import re
from collections.abc import Callable
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "12+34="}], "max_tokens": 8}


@pytest.fixture(scope="module")
def server(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One without llguidance, whose interpreters report the imports of all three processes."""
    folder = tmp_path_factory.mktemp("without_llguidance")
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['llguidance'] = None  # as if not installed\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        return start(interpreter=("-X", "importtime"))


def _imports(server: Any) -> list[str]:
    return re.findall(r"import time:.*\|\s+(\S+)$", server.log, re.MULTILINE)


def test_nothing_is_left_to_import_for_the_first_chat(server: Any) -> None:
    """So it takes no longer than later ones."""
    ready = _imports(server)
    assert ready.count("torch") >= 2  # the front and the process with the model
    for change in ({}, {"n": 4}, {"stream": True}, {"stream": True, "n": 4}):
        assert server.call("POST", CHAT, ASK | change)[0] == 200
    assert _imports(server)[len(ready) :] == []


def test_structured_outputs_without_llguidance_are_refused_by_what_to_install(server: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    for change in (
        {"response_format": {"type": "json_object"}},
        {"response_format": schema},
        {"structured_outputs": {"regex": "a+"}},
        {"structured_outputs": {"choice": ["a"]}, "stream": True},
    ):
        status, answer = server.post(CHAT, ASK | change)
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
        assert "pip install 'grpo_pl[structured]'" in answer["error"]["message"]
        assert answer["error"]["param"] == next(iter(change))
    assert server.post(CHAT, ASK | {"response_format": {"type": "text"}})[0] == 200
    assert "Traceback" not in server.log
