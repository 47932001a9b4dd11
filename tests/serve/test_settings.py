"""The settings of the server: the command line and the page of docs say what the dataclass says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from grpo_pl.cli.main import main
from serve.settings import ServeSettings

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"


def test_options_of_the_command_line_are_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServeSettings] = []
    monkeypatch.setattr("serve.server.run_server", served.append)
    monkeypatch.setenv("GRPO_PL_API_KEY", "of the environment")
    options = "--model m --port=0 --http h11 --deadline 7 --allowed-host a.org,b.org --served-model-name 12"
    assert main(["serve", *options.split()]) == 0
    expected = ServeSettings(
        model=Path("m"),
        port=0,
        http="h11",
        deadline=7.0,
        allowed_host="a.org,b.org",
        served_model_name="12",
        api_key="of the environment",
    )
    assert served == [expected]
    assert served[0].allowed_hosts == ["a.org", "b.org"]


def test_a_key_of_the_environment_is_not_on_the_help_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRPO_PL_API_KEY", "hidden-key")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    page = capsys.readouterr().out
    assert "hidden-key" not in page
    text = " ".join(page.split())
    assert "--max_queue MAX_QUEUE Requests that may wait for a slot" in text
    for field in fields(ServeSettings):
        assert f"--{field.name} " in text


def test_docs_name_every_option_with_its_default() -> None:
    told: dict[str, str] = {}
    for names, default in re.findall(r"^\| (`--[^|]+) \| ([^|]*)\|", DOCS.read_text(), re.MULTILINE):
        options = re.findall(r"`--([\w-]+)`", names)
        values = [part.strip() for part in default.split(",")]
        told |= dict(zip(options, values * (len(options) // len(values)), strict=True))
    expected = {field.name.replace("_", "-"): str(field.default or "") for field in fields(ServeSettings)}
    by_default = {"deadline": "120", "max-body-mb": "8", "api-key": "`$GRPO_PL_API_KEY`"}
    assert told == expected | by_default | {"served-model-name": "the run's name"}
