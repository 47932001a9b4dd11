"""In which form a policy calls tools: as it was trained, or else in Hermes' form."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.extras.agents.calculator import calc
from grpo_pl.extras.agents.tool_calls import HermesCalls, TagCalls
from grpo_pl.extras.agents.tool_form import ToolForm
from grpo_pl.extras.agents.tools import ToolEnvironment
from grpo_pl.policy.dialogue import PlainTurns
from grpo_pl.policy.pretrained import MANIFEST
from grpo_pl.policy.trained import find_model
from grpo_pl.rewards.trust import Untrusted

PLAIN = {"observation": "[{observation}]", "tools": "{tools}"}


def trained(parser: Any, **settings: Any) -> dict[str, Any]:
    return {"class_path": "grpo_pl.extras.agents.tools.ToolEnvironment", "init_args": {"parser": parser, **settings}}


def test_it_is_that_of_training() -> None:
    spec = ToolEnvironment(tools=[calc], parser=TagCalls(result="= {text}")).spec()
    form = ToolForm.of(spec, {"max_turns": 3, "plain_turns": PLAIN})
    assert form == ToolForm(parser=TagCalls(result="= {text}"), plain=PlainTurns(**PLAIN))
    assert ToolForm.of(trained(None), {}) == ToolForm(parser=HermesCalls(), plain=PlainTurns())
    assert ToolForm.of(trained("grpo_pl.extras.agents.tool_calls.TagCalls"), {}).parser == TagCalls()  # as in YAML
    assert ToolForm.of(trained(None, tools=["nowhere:at_all"]), {}).plain == PlainTurns()  # no tool is imported


@pytest.mark.parametrize(
    "environment",
    [None, {"class_path": "my.Game"}, {"class_path": "my.Game", "init_args": {"parser": {"class_path": "my.Moves"}}}],
)
def test_without_tools_in_training_it_is_hermes_and_the_schemas_are_told(environment: Any) -> None:
    form = ToolForm.of(environment, {"plain_turns": PLAIN})
    assert form == ToolForm() and isinstance(form.parser, HermesCalls)
    assert "{tools}" in form.plain.tools


def test_a_parser_of_somebody_else_needs_trust() -> None:
    foreign = trained({"class_path": "user_tools.Shouted"})
    with pytest.raises(Untrusted, match=r"parser .user_tools\.Shouted. cannot be imported"):
        ToolForm.of(foreign, {})


def test_a_setting_that_no_parser_has_is_one_line() -> None:
    with pytest.raises(ValueError, match="shout") as caught:
        ToolForm.of(trained({"class_path": "grpo_pl.extras.agents.tool_calls.TagCalls", "init_args": {"shout": 1}}), {})
    assert "\n" not in str(caught.value)


def test_an_export_and_a_run_bring_it_along(tmp_path: Path) -> None:
    spec = ToolEnvironment(tools=[calc], parser=TagCalls()).spec()
    told: dict[str, Any] = {"template": {}, "rewards": [], "environment": spec, "episodes": {"plain_turns": PLAIN}}
    (tmp_path / MANIFEST).write_text(json.dumps(told))
    model = find_model(tmp_path)
    assert model.tools == ToolForm(parser=TagCalls(), plain=PlainTurns(**PLAIN))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    tree = {**told, "policy": {"path": "nowhere"}}
    (tmp_path / "config.yaml").write_text(json.dumps({"model": tree}))
    assert find_model(tmp_path / "checkpoints" / "last.ckpt").tools == model.tools
