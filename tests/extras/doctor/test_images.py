"""``grpo-pl doctor`` of policies that read images: D15 of one that cannot see, and silence about one that can."""

import json
from typing import Any

import pytest

from tests.conftest import CommandLine
from tests.images import SMOLVLM

BLIND = {**SMOLVLM, "vision_config": {**SMOLVLM["vision_config"], "layer_norm_eps": 1e20}}
"""All images are the same to it: what its vision tower finds is divided by ten billion."""


@pytest.mark.parametrize(("policy", "unmoved"), [(BLIND, range(20, 21)), (SMOLVLM, range(12))])
def test_a_policy_that_cannot_see_is_found(command_line: CommandLine, policy: Any, unmoved: range) -> None:
    shapes = {"class_path": "grpo_pl.data.tasks.shapes.ShapePrompts", "init_args": {"questions": ["color"]}}
    config = command_line.config(
        "eyes",
        model__policy={"from_scratch": policy, "images": True},
        model__cold_start=None,
        model__sampling={"max_completion_length": 6},
        data__source=shapes,
        data__val_prompts=20,
    )
    outcome = command_line("doctor", "--config", config, "--json", "--rollouts=3")
    assert outcome.out.startswith("{"), outcome.err
    report = json.loads(outcome.out)
    first, *others = report["signs"]["rollouts"]
    assert first["swapped"] == 20 and first["unmoved"] in unmoved and not any(one["swapped"] for one in others)
    assert ("D15" in [finding["code"] for finding in report["findings"]]) == (policy is BLIND)
