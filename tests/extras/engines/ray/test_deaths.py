"""Actors and nodes that die lose no sample, and double none."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from grpo_pl.rollout.engine import EngineDied
from grpo_pl.rollout.native.engine import NativeEngine
from tests.extras.engines.ray.conftest import MARKS, draw
from tests.rollout.drawn import assert_same, build_model

pytestmark = MARKS
REPEATS = [pytest.param(1, id="once"), pytest.param(10, id="ten", marks=pytest.mark.slow)]


_assert_equal = partial(assert_same, atol=1e-5)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("times", REPEATS)
def test_an_actor_a_raylet_or_a_node_that_dies_in_a_draw_or_a_push_costs_no_sample(
    cluster: Any, connect: Any, caplog: Any, times: int, tmp_path: Path
) -> None:
    model = build_model("qwen2")
    reference = draw(NativeEngine(), model, length=70)  # for an actor outlives its raylet by a moment
    engine = connect("SlowLoadingEngine", actors=2, pause_s=0.08, marks=str(tmp_path))
    draw(engine, model, length=1)
    for moment, victim in [*product(("draw", "push"), ("actor", "raylet", "node"))] * times:
        caplog.clear()
        for mark in tmp_path.iterdir():
            mark.unlink()
        if moment == "push":
            engine.update_weights(model)
        pushes, victims = engine.pushes, [victim]

        def kill(tokens: int, finished: int, moment: str = moment, victims: list[str] = victims) -> None:
            loading = len(list(tmp_path.iterdir())) == 2  # both, for the kill is to hit one that is
            while victims and (tokens if moment == "draw" else loading):
                if victims.pop() == "actor":
                    cluster.actors()[0].kill()
                else:
                    cluster.lose(whole=victim == "node")  # noqa: B023 - called before the next turn
                    cluster.add()

        _assert_equal(draw(engine, model, length=70, progress=kill), reference)
        lost = [line for line in caplog.messages if "never ran" not in line]  # of one that was sent to the dead node
        assert len(lost) == 1 and "Another draws its part of the rollout again." in lost[0], (moment, victim)
        assert engine.pushes == pushes + (moment == "push")


def test_a_second_death_in_one_part_ends_the_run_in_one_line(connect: Any) -> None:
    with pytest.raises(EngineDied, match="It was the second in this part of a rollout; --resume goes on") as death:
        draw(connect("DyingEngine"), build_model("qwen2"))
    assert death.value.final and "\n" not in str(death.value)


def test_an_actor_that_takes_the_place_of_the_first_ranks_tells_others_of_the_weights(
    cluster: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, victims = build_model("qwen2"), ["first"]
    reference = draw(NativeEngine(), model, length=40)
    ranks = [connect(pause_s=0.05), connect()]
    for engine in ranks:
        engine._run = "a-run"  # as ranks agree on

    def kill(tokens: int, finished: int) -> None:
        if tokens and victims:
            victims.pop()
            cluster.actors()[0].kill()

    for rank, engine in enumerate(ranks):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        stored = cluster.stored_objects()
        _assert_equal(draw(engine, model, length=40, progress=None if rank else kill), reference)
    assert victims == [] and cluster.stored_objects() == stored  # the other took the first one's weights
