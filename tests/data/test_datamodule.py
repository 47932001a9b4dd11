"""Which prompts of a step a process gets, and where a restored data module goes on."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest

from grpo_pl.data.datamodule import RolloutDataModule, check_distinct, groups_of
from grpo_pl.data.sources import PromptSource
from grpo_pl.types import Problem, PromptBatch


@dataclass(kw_only=True)
class Numbered(PromptSource):
    """Prompt ids that tell step, attempt and position; seven held-out prompts."""

    held_out: int = 7

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        return [_prompt(1000 * step + 100 * attempt + i) for i in range(count)]

    def validation(self, count: int | None = None) -> list[Problem]:
        return [_prompt(-1 - i) for i in range(self.held_out)][:count]


def _prompt(identity: int) -> Problem:
    return Problem(id=identity, question=f"{identity}?", answer=str(identity))


def _on_rank(data: RolloutDataModule, rank: int, world: int) -> RolloutDataModule:
    share = {"rank": rank, "num_replicas": world}
    data.trainer = SimpleNamespace(strategy=SimpleNamespace(distributed_sampler_kwargs=share))
    return data


def _ids(batch: PromptBatch) -> list[int]:
    return [prompt.id for prompt in batch.prompts]


def test_item_i_of_the_training_set_is_the_prompts_of_step_i() -> None:
    data = RolloutDataModule(Numbered(), steps=3, prompts_per_step=2)
    batches = list(data.train_dataloader())
    assert [batch.step for batch in batches] == [0, 1, 2]
    assert [_ids(batch) for batch in batches] == [[0, 1], [1000, 1001], [2000, 2001]]


def test_ranks_share_a_step_without_overlap_in_order() -> None:
    shares = [
        _ids(_on_rank(RolloutDataModule(Numbered(), prompts_per_step=6), rank, 3).prompts(5, attempt=2))
        for rank in range(3)
    ]
    assert shares == [[5200, 5201], [5202, 5203], [5204, 5205]]


def test_prompts_that_do_not_divide_among_the_processes_are_refused() -> None:
    data = _on_rank(RolloutDataModule(Numbered(), prompts_per_step=5), 0, 2)
    with pytest.raises(ValueError, match="prompts_per_step=5 does not divide among 2 processes"):
        data.prompts(0)


def test_completed_rollouts_are_the_whole_state() -> None:
    data = RolloutDataModule(Numbered(), steps=4, prompts_per_step=1)
    data.completed_rollouts = 2
    assert data.state_dict() == {"completed_rollouts": 2, "source": {}}
    restored = RolloutDataModule(Numbered(), steps=4, prompts_per_step=1)
    restored.load_state_dict(data.state_dict())
    assert [batch.step for batch in restored.train_dataloader()] == [2, 3]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_held_out_problems_reach_the_ranks_once_each_and_in_equal_numbers(world: int) -> None:
    parts = [
        [
            cast(PromptBatch, batch)
            for batch in _on_rank(RolloutDataModule(Numbered(), val_batch_size=2), rank, world).val_dataloader()
        ]
        for rank in range(world)
    ]
    for slices in zip(*parts, strict=True):  # every rank has equally many batches, each of the same size
        assert len({len(batch.prompts) for batch in slices}) == 1
    real = [
        p.id for part in parts for batch in part for p, valid in zip(batch.prompts, batch.valid, strict=True) if valid
    ]
    assert sorted(real) == [-7, -6, -5, -4, -3, -2, -1]


def test_a_validation_is_of_the_first_problems_and_its_share_that_of_its_batches() -> None:
    data = RolloutDataModule(Numbered(), val_prompts=5, val_batch_size=2)
    assert [_ids(batch) for batch in data.val_dataloader()] == [[-1, -2], [-3, -4], [-5]]
    assert [data.held_out_share(batches) for batches in (0, 1, 2, 3, 9)] == [0, 2, 4, 5, 5]


@pytest.mark.parametrize("argument", ["steps", "prompts_per_step", "val_batch_size"])
def test_sizes_below_one_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=f"data needs {argument} >= 1, got 0"):
        RolloutDataModule(Numbered(), **{argument: 0})


def test_named_sets_and_sources_make_groups() -> None:
    mixed = [Problem(id=i, question="?", answer="", source=s) for i, s in enumerate(["a", "b", "a"])]
    alone = [Problem(id=i, question="?", answer="", source="a") for i in range(2)]
    groups = groups_of({"val": mixed, "val/hard": alone})
    assert groups == {("val", "a"): ("val", "val/a"), ("val", "b"): ("val", "val/b"), ("val/hard", "a"): ("val/hard",)}
    with pytest.raises(ValueError, match="has a set 'a', which is the name of a source"):
        groups_of({"val": mixed, "val/a": alone})


def test_named_sets_follow_one_after_the_other() -> None:
    data = RolloutDataModule(Numbered(held_out=3), val_batch_size=2, validation_sets={"more": Numbered(held_out=1)})
    batches = [(_ids(batch), batch.groups) for batch in data.val_dataloader()]
    assert batches == [
        ([-1, -2], (("val",), ("val",))),
        ([-3], (("val",),)),
        ([-1], (("val/more",),)),
    ]
    assert data.held_out_groups() == ["val", "val/more"]


def test_a_named_set_alone_is_enough_and_none_at_all_is_refused() -> None:
    data = RolloutDataModule(Numbered(held_out=0), validation_sets={"more": Numbered(held_out=2)})
    assert data.held_out_groups() == ["val/more"]
    with pytest.raises(ValueError, match="no held-out problems"):
        RolloutDataModule(Numbered(held_out=0)).val_dataloader()


def test_problems_of_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two problems of val have the id 7: 'a' and 'b'"):
        check_distinct([Problem(id=7, question="a", answer=""), Problem(id=7, question="b", answer="")], "val")
