"""Tests of attention to shared prompts: one softmax over each row's prompt and its own columns, for all rows left."""

import pytest
import torch

from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.native.shared_prompts import SHORTEST, SharedPrompts, worth_sharing
from grpo_pl.rollout.plain import PlainEngine
from tests.rollout.drawn import assert_same, build_model, generate, make_keys

OWNERS = torch.tensor([0, 0, 0, 1, 2, 2])  # groups of three, one and two
MASK = torch.tensor([[True] * 4, [False, True, True, True], [False, False, False, True]])


def _by_hand(queries, prompt, own, mask, scale):
    """One query head (D,) of one row: its columns are the real ones of its prompt (2, S, D) and its own (2, C, D)."""
    keys, values = torch.cat([prompt[:, mask], own], dim=1).double()
    return ((keys @ queries.double() * scale).softmax(dim=0) @ values).float()


@pytest.mark.parametrize("kept", [[0, 1, 2, 3, 4, 5], [0, 5, 2, 4], [5, 4], [3], [1, 0]])
@pytest.mark.parametrize("key_heads, shared", [(2, 1), (1, 3)])
def test_each_row_attends_to_its_prompt_and_to_itself(kept, key_heads, shared):
    torch.manual_seed(0)
    prompts = torch.randn(2, 2, 3, key_heads, 4, 5)  # layers, keys and values, P, heads, S, D
    attention = SharedPrompts(prompts, MASK, OWNERS)
    if kept != list(range(6)):
        attention.keep(kept)
    queries, own = torch.randn(6, key_heads, shared, 5)[kept], torch.randn(2, 6, key_heads, 3, 5)[:, kept]
    mixed = attention.attend(1, queries, own[0], own[1], scale=0.4).view(len(kept), key_heads, shared, 5)
    for place, row in enumerate(kept):
        for head in range(key_heads):
            for query in range(shared):
                owner = int(OWNERS[row])
                by_hand = _by_hand(
                    queries[place, head, query], prompts[1, :, owner, head], own[:, place, head], MASK[owner], 0.4
                )
                torch.testing.assert_close(mixed[place, head, query], by_hand, atol=1e-6, rtol=1e-5)


def test_prompts_without_rows_are_dropped_where_they_are_half_of_all():
    prompts = torch.randn(1, 2, 3, 1, 4, 5)
    attention = SharedPrompts(prompts, MASK, OWNERS)
    attention.keep([0, 3])
    assert attention.cache[0].shape[1] == 3  # two of three are left
    attention.keep([1])
    assert torch.equal(attention.cache[0], prompts[0][:, 1:2])


def test_only_long_prompts_of_groups_in_float32_on_a_cpu_are_shared():
    ids = torch.zeros(4, SHORTEST, dtype=torch.int64)
    assert worth_sharing(torch.float32, ids, rows=8)
    assert not worth_sharing(torch.float32, ids, rows=4)
    assert not worth_sharing(torch.float32, ids[:, 1:], rows=8)
    assert not worth_sharing(torch.bfloat16, ids, rows=8)
    assert not worth_sharing(torch.float32, ids.to("meta"), rows=8)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("rows", [0, 7])
def test_long_prompts_give_the_samples_of_the_plain_engine(monkeypatch, family, rows):
    """Rows end at different places, so that most prompts lose their rows before the last token."""
    asked = []
    attend = SharedPrompts.attend
    monkeypatch.setattr(SharedPrompts, "attend", lambda self, *a, **k: asked.append(a[0]) or attend(self, *a, **k))
    prompts = [[(7 * i + p) % 36 + 1 for i in range(SHORTEST + p)] for p in range(6)]
    model, keys = build_model(family), make_keys(6, 5)
    ours = generate(NativeEngine(max_batch_rows=rows), model, prompts, keys, length=20)
    assert asked
    assert_same(ours, generate(PlainEngine(), model, prompts, keys, length=20))
    assert len(set(ours.lengths.tolist())) > 5
