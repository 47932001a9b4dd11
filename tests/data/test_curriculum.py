"""What the curriculum prefers, passes over, remembers and restores."""

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.data.curriculum import CurriculumPrompts
from grpo_pl.data.mixture import MixturePrompts
from grpo_pl.data.sources import PromptSource
from grpo_pl.data.tables import TablePrompts
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.types import Problem


@dataclass(kw_only=True)
class Ten(PromptSource):
    """The same ten problems at every step, from another one on at every attempt."""

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        ids = [(attempt * count + i) % 10 for i in range(count)]
        return [Problem(id=i, question=f"{i}?", answer="") for i in ids]

    def validation(self, count: int | None = None) -> list[Problem]:
        return []


def _ids(source: CurriculumPrompts, step: int, count: int = 3) -> list[int]:
    return [prompt.id for prompt in source.prompts(step, count=count)]


def test_problems_solved_half_of_the_time_come_most_and_solved_ones_never() -> None:
    source = CurriculumPrompts(source=Ten(), pool=10)
    rates = {0: 0.0, 1: 0.5, **dict.fromkeys(range(2, 10), 1.0)}
    for _ in range(2):
        source.observe(rates)
    seen = Counter(source.prompts(step, count=1)[0].id for step in range(300))
    assert set(seen) == {0, 1}
    assert seen[1] / 300 == pytest.approx(0.27 / (0.27 + 0.02), abs=0.05)


def test_solved_ones_fill_up_where_there_are_too_few_others() -> None:
    source = CurriculumPrompts(source=Ten(), pool=10, solved_after=1)
    source.observe(dict.fromkeys(range(8), 1.0))
    assert set(_ids(source, 0)[:2]) == {8, 9}
    assert len(set(_ids(source, 0, count=5))) == 5


def test_a_source_that_has_just_a_step_of_prompts_gives_them() -> None:
    assert sorted(_ids(CurriculumPrompts(source=Ten(), pool=100), 0, count=10)) == list(range(10))
    made_up = ArithmeticPrompts(digits=1)  # it knows fewer than two hundred, and no list of them
    assert len(set(_ids(CurriculumPrompts(source=made_up, pool=4), 0, count=64))) == 64


def test_attempts_of_a_step_have_candidates_of_their_own() -> None:
    source = CurriculumPrompts(source=Ten(), pool=2)
    first, second = ({p.id for p in source.prompts(0, attempt, count=2)} for attempt in (0, 1))
    assert first <= {0, 1, 2, 3} and second <= {4, 5, 6, 7}


def test_the_parts_of_a_mixture_may_have_no_more_than_their_shares(tmp_path: Path) -> None:
    parts: dict[str, PromptSource] = {}
    for name, rows in (("small", 12), ("large", 400)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(f'{{"question": "{name} {i}?", "answer": "{i}"}}\n' for i in range(rows)))
        parts[name] = TablePrompts(path=str(file), val_share=0.0)
    source = CurriculumPrompts(source=MixturePrompts(parts=parts), pool=4, solved_after=1)
    for step in range(3):
        chosen = source.prompts(step, count=16)
        assert len({p.id for p in chosen}) == 16
        source.observe({p.id: float(p.source == "small") for p in chosen})
    assert {p.source for p in source.prompts(3, count=16)} == {"large"}  # all of the small one are solved


def test_running_rate_by_hand_and_the_first_visit_counts_whole() -> None:
    source = CurriculumPrompts(source=Ten(), memory=0.75, solved_at=0.9, solved_after=2)
    source.observe({3: 1.0})
    assert not source.is_solved(3)  # one visit
    source.observe({3: 0.5})  # 0.75 * 1 + 0.25 * 0.5
    assert source.state_dict()["rates"].tolist() == [0.875]
    source.observe({3: 1.0})
    assert source.is_solved(3)  # 0.90625


def test_draws_are_a_function_of_step_and_statistics_which_survive_a_checkpoint() -> None:
    source, fresh = CurriculumPrompts(source=Ten(), pool=3), CurriculumPrompts(source=Ten(), pool=3)
    source.observe({1: 1.0, 2: 0.1, 7: 1 / 3})
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert [_ids(source, step) for step in range(20)] == [_ids(fresh, step) for step in range(20)]
    assert [_ids(source, step) for step in range(5)] != [_ids(source, step) for step in range(5, 10)]
    fresh.observe({1: 0.0})
    assert fresh.state_dict()["rates"].tolist() == [0.5, 0.1, 1 / 3]


def test_the_cold_start_does_not_see_statistics() -> None:
    source = CurriculumPrompts(source=Ten(), pool=10, solved_after=1)
    before = _ids(source, -4)
    source.observe(dict.fromkeys(range(10), 1.0))
    assert _ids(source, -4) == before


@pytest.mark.parametrize("arguments", [{"pool": 0}, {"memory": 1.0}, {"solved_at": 0.0}, {"solved_after": 0}])
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"curriculum needs {next(iter(arguments))} "):
        CurriculumPrompts(source=Ten(), **arguments)


def test_a_resumed_run_draws_what_one_run_would_have(
    fresh_command_line: Any, read_metrics: Callable[..., list[dict[str, str]]]
) -> None:
    source = {
        "class_path": "grpo_pl.data.curriculum.CurriculumPrompts",
        "init_args": {
            "pool": 4,
            "source": {
                "class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts",
                "init_args": {"digits": 1, "scratchpad_share": 0.0},
            },
        },
    }
    config = fresh_command_line.config("curriculum", data__source=source, data__steps=3)
    fresh_command_line.done("fit", f"--config={config}")
    run = fresh_command_line.runs / "curriculum"
    fresh_command_line.done("fit", f"--config={config}", f"--ckpt_path={run}/checkpoints/rollout-000002.ckpt")
    whole = [row for row in read_metrics(run / "metrics.csv") if "reward" in row]
    half = [row for row in read_metrics(fresh_command_line.runs / "curriculum-2" / "metrics.csv") if "reward" in row]
    assert half == whole[-1:]
    saved = torch.load(run / "checkpoints" / "rollout-000003.ckpt", weights_only=True)
    (state,) = [value for value in saved.values() if isinstance(value, dict) and "completed_rollouts" in value]
    assert len(state["source"]["ids"]) > 0
