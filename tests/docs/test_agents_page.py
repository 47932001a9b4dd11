"""The configurations on the page can be built."""

import sys

import yaml

from grpo_pl.config.objects import build
from grpo_pl.data.sources import PromptSource
from grpo_pl.environments import Environment
from tests.docs.pages import blocks, page


def test_every_environment_on_the_page_and_its_source_can_be_built() -> None:
    found = set()
    for block in blocks(page("agents"), "yaml"):
        tree = yaml.safe_load(block.replace("/path/of/the/other/venv/bin/python", sys.executable))
        given = tree["model"]["environment"] if "model" in tree else tree
        found.add(type(build(Environment, given, "environment")).__name__)
        if "data" in tree:
            source = build(PromptSource, tree["data"]["source"], "source")
            assert source.environment.env["agent"]["harness"]["id"] == "null"  # type: ignore[attr-defined]
    assert found == {"AgentEnvironment", "VerifiersEnvironment", "InspectEnvironment"}
