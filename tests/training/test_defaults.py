"""Derived values worked out by hand, which fields they are for, and how they enter a run and its configuration."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.json_lines import JsonLinesPrompts
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.lora import Lora
from grpo_pl.training.cold_start import ColdStart
from grpo_pl.training.defaults import (
    Derived,
    RunFacts,
    demonstration_rate,
    demonstration_steps,
    derive,
    peak_rate,
    prompts_of_a_step,
    run_facts,
    table,
    unset_fields,
    warm_up,
)
from grpo_pl.training.optimization import Optimization
from tests.conftest import TINY_POLICY


@pytest.mark.parametrize(
    ("rule", "parameters", "kind", "rate"),
    [
        (peak_rate, 50_000, "from scratch", 4e-4),  # the most
        (peak_rate, 600_000, "from scratch", 4e-4),
        (peak_rate, 9_600_000, "from scratch", 2e-4),  # 16 times as many: 16^(1/4) = 2
        (peak_rate, 500_000_000, "trained before", 1e-6),
        (peak_rate, 7_000_000_000, "trained before", 1e-6),  # the least
        (peak_rate, 500_000, "trained before", 2e-4),  # half of 4e-4, which is less than 1000^0.85 · 1e-6
        (peak_rate, 5_000_000, "trained before", 5.0e-5),  # 100^0.85 · 1e-6
        (peak_rate, 500_000_000, "adapters", 1e-5),
        (demonstration_rate, 600_000, "from scratch", 3e-3),
        (demonstration_rate, 9_600_000, "from scratch", 1.5e-3),
        (demonstration_rate, 500_000_000, "trained before", 1e-5),
        (demonstration_rate, 500_000_000, "adapters", 1e-4),
        (demonstration_rate, 500_000, "trained before", 2e-3),
    ],
)
def test_rates_by_hand(rule: Any, parameters: int, kind: Any, rate: float) -> None:
    assert rule(parameters, kind) == pytest.approx(rate)


def test_rates_never_rise_with_size_and_are_ordered_by_kind() -> None:
    sizes = [10**exponent for exponent in range(4, 12)]
    for kind in ("from scratch", "trained before", "adapters"):
        rates = [peak_rate(size, kind) for size in sizes]  # type: ignore[arg-type]
        assert rates == sorted(rates, reverse=True)
    assert all(peak_rate(size, "trained before") < peak_rate(size, "from scratch") for size in sizes)


def test_counts_by_hand() -> None:
    assert [warm_up(rollouts) for rollouts in (1, 40, 120, 1000)] == [0, 2, 6, 10]
    assert [prompts_of_a_step(group, None) for group in (4, 8, 16, 512)] == [64, 32, 16, 1]
    assert [prompts_of_a_step(8, problems) for problems in (1, 2, 3, 5, 63, 64, 1000)] == [1, 1, 1, 2, 16, 32, 32]
    assert [demonstration_steps("from scratch", tokens, None, 32) for tokens in (8, 40, 64, 90, 999)] == [
        600,
        720,  # 18 a token
        800,
        711,  # 64,000 tokens in all
        600,
    ]
    assert demonstration_steps("from scratch", 64, 100, 32) == 125  # 40 passes
    assert demonstration_steps("from scratch", 64, 10**6, 32) == 800
    assert demonstration_steps("trained before", 64, None, 16) == 200
    assert demonstration_steps("trained before", 64, 160, 16) == 30  # 3 passes
    assert demonstration_steps("trained before", 64, 1, 16) == 1


def test_only_what_is_null_is_derived() -> None:
    known = RunFacts(parameters=100_000, kind="from scratch", rollouts=100, group_size=8, tokens=64)
    unset = unset_fields(
        Optimization(warmup_rollouts=0), ColdStart(steps=7), RolloutDataModule(ArithmeticPrompts(), prompts_per_step=2)
    )
    values = {each.field: each.value for each in derive(known, unset)}
    assert values == {
        "model.optimization.lr": 4e-4,
        "model.optimization.schedule": "cosine",
        "model.cold_start.lr": 3e-3,
        "model.cold_start.batch_size": 32,
    }
    assert unset_fields(Optimization(), None, RolloutDataModule(ArithmeticPrompts())) == [
        "model.optimization.lr",
        "model.optimization.warmup_rollouts",
        "model.optimization.schedule",
        "data.prompts_per_step",
    ]


def test_what_is_known_is_counted() -> None:
    data = RolloutDataModule(ArithmeticPrompts(), steps=60)
    policy = PolicyConfig(from_scratch=TINY_POLICY)
    known = run_facts(policy, 4, 32, None, data, episodes=False)
    # 103 tokens of width 32; 4 projections of 32² and 3 biases, 3 of 32 · 48, 2 norms, 1 norm at the end
    assert known.parameters == 103 * 32 + 4 * 32**2 + 3 * 32 + 3 * 32 * 48 + 3 * 32
    assert (known.kind, known.rollouts, known.group_size, known.problems) == ("from scratch", 60, 4, None)
    assert known.tokens == 32


def test_a_file_of_problems_and_demonstrations_is_counted(
    tmp_path: Path, tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    tiny_policy.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    problems, shown = tmp_path / "problems.jsonl", tmp_path / "shown.jsonl"
    problems.write_text("".join(f'{{"question": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(10)))
    shown.write_text('{"prompt": "1+1=", "completion": "2"}\n' * 3)
    data = RolloutDataModule(JsonLinesPrompts(path=str(problems), val_share=0.0))
    policy = PolicyConfig(path=str(tmp_path / "model"), lora=Lora(rank=2))
    known = run_facts(policy, 8, 32, ColdStart(demonstrations=str(shown)), data, episodes=True)
    assert (known.kind, known.problems, known.demonstrations) == ("adapters", 10, 3)
    few = run_facts(policy, 8, 32, ColdStart(demonstrations=str(shown), count=2), data, episodes=True)
    own = run_facts(policy, 8, 32, ColdStart(count=5), data, episodes=True)
    assert (few.demonstrations, own.demonstrations) == (2, 5)
    data.source = JsonLinesPrompts(path=str(problems), val_share=0.0, demonstrated_share=0.5)
    half = run_facts(policy, 8, 32, ColdStart(), data, episodes=True)
    assert (half.problems, half.demonstrations) == (10 - data.source.demonstrated(), data.source.demonstrated())
    (steps, batch) = (each.value for each in derive(half, ["model.cold_start.steps", "model.cold_start.batch_size"]))
    assert 0 < half.demonstrations < 10 and {steps, batch} == {3, half.demonstrations}  # 3 passes, one a step
    assert known.tokens == 48  # the context of the policy, which an episode may fill


def test_the_table_has_a_line_for_each_value_with_its_reason() -> None:
    lines = table([Derived("model.optimization.lr", 1e-3, "small"), Derived("data.prompts_per_step", 32, "groups")])
    assert [line.split() for line in lines.splitlines()[1:]] == [
        ["model.optimization.lr", "0.001", "small"],
        ["data.prompts_per_step", "32", "groups"],
    ]


def test_a_run_that_derived_nothing_says_what_to_give() -> None:
    with pytest.raises(ValueError, match=r"optimization\.lr is null"):
        Optimization().lr_at(0, 1)
    with pytest.raises(ValueError, match="cold_start: steps, batch_size or lr is null"):
        _ = ColdStart(steps=1).size
    with pytest.raises(ValueError, match=r"data\.prompts_per_step is null"):
        _ = RolloutDataModule(ArithmeticPrompts()).prompt_count


def test_derived_values_are_printed_frozen_and_not_derived_again(command_line: Any) -> None:
    config = command_line.config("derived", model__optimization={}, data__steps=2)
    first = command_line.done("fit", "--config", config)
    assert "model.optimization.lr " in first.err and "from scratch" in first.err
    assert "data.prompts_per_step" not in first.err  # which is set
    frozen = yaml.safe_load((command_line.runs / "derived" / "config.yaml").read_text())
    assert frozen["model"]["optimization"]["lr"] == 4e-4  # fewer than 10⁵ parameters
    assert frozen["model"]["optimization"]["schedule"] == "cosine"
    own = command_line.runs / "derived" / "config.yaml"
    frozen["model"]["optimization"]["lr"] = 7e-4  # what an older rule may have given
    own.write_text(yaml.safe_dump(frozen))
    again = command_line("fit", "--config", config, "--resume", "--data.steps=3")
    assert again.status == 0 and "derived (" not in again.err
    assert yaml.safe_load(own.read_text())["model"]["optimization"]["lr"] == 7e-4
