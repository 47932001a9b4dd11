"""Tests of the plain engine, the one that others are checked against."""

import pytest
import torch
from transformers import GenerationConfig

from grpo_pl.rollout.engine import RolloutInterrupted
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import Rollout
from tests.race import draw_key, logits_along, winner
from tests.rollout.drawn import UNEVEN, build_model, generate, make_keys, rows_of

PAD = 0


def _generate(model, keys, *, rows=0, **how) -> Rollout:
    """Completions of up to twelve tokens of all of ``UNEVEN``; no token ends one unless told otherwise."""
    return generate(PlainEngine(max_batch_rows=rows), model, UNEVEN, keys, **{"length": 12, "eos": (), **how})


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_each_completion_is_a_function_of_its_key_alone(family):
    """Padding, cache and neighbours change nothing; GPT-2 has absolute positions, so padding must not shift them."""
    model, keys, eos = build_model(family), make_keys(3, 4), (6, 20)
    rollout = _generate(model, keys, eos=eos, temperature=0.9)
    for row, tokens in enumerate(rows_of(rollout)):
        logits = logits_along(model, UNEVEN[row // 4], tokens) / 0.9
        keys_of_tokens = [draw_key(keys[row // 4][row % 4], position) for position in range(len(tokens))]
        assert [winner(*each) for each in zip(logits.tolist(), keys_of_tokens, strict=True)] == tokens
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(rollout.sampling_logprobs[row, : len(tokens)], logprobs.float(), atol=1e-4, rtol=0.0)
    assert len({tuple(row) for row in rollout.completion_ids.tolist()}) > 6  # samples of a group differ


def test_rollout_has_the_promised_shape():
    rollout = _generate(build_model("qwen2"), make_keys(3, 2), eos=(6, 20), length=15)
    assert rollout.prompt_ids.shape == (6, 7) and rollout.prompt_ids[2].tolist() == [PAD] * 6 + [2]
    assert rollout.prompt_mask.sum(dim=1).tolist() == [7, 7, 1, 1, 4, 4]
    columns = rollout.completion_ids, rollout.completion_mask, rollout.sampling_logprobs
    for *tensors, reason in zip(*columns, rollout.finish_reasons, strict=True):
        ids, mask, logprobs = (tensor.tolist() for tensor in tensors)
        length = sum(mask)
        assert mask == [True] * length + [False] * (len(mask) - length)
        assert all(token not in (6, 20) for token in ids[: length - 1])
        assert (ids[length - 1] in (6, 20)) == (reason == "stop")
        assert ids[length:] == [PAD] * (len(ids) - length) and logprobs[length:] == [0.0] * (len(ids) - length)
    assert set(rollout.finish_reasons) == {"stop", "length"}
    assert rollout.completion_ids.shape[1] == rollout.lengths.max()


def test_padding_may_equal_an_end_token():
    model, keys = build_model("qwen2"), make_keys(3, 3)
    apart = _generate(model, keys, eos=(6, 20), pad=PAD)
    same = _generate(model, keys, eos=(6, 20), pad=20)
    assert torch.equal(apart.completion_mask, same.completion_mask)
    assert torch.equal(apart.completion_ids[apart.completion_mask], same.completion_ids[same.completion_mask])
    assert apart.finish_reasons == same.finish_reasons


def test_greedy_completions_of_a_group_are_equal():
    model = build_model("qwen2")
    rollout = _generate(model, make_keys(3, 2), temperature=0.0, length=6)
    assert torch.equal(rollout.completion_ids[::2], rollout.completion_ids[1::2])
    reference = model.eval().generate(
        torch.tensor([UNEVEN[0]]),
        generation_config=GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0),
    )
    assert rollout.completion_ids[0].tolist() == reference[0, len(UNEVEN[0]) :].tolist()


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_generation_defaults_are_restored(training):
    model = build_model("qwen2").train(training)
    own = model.generation_config
    _generate(model, make_keys(3, 1))
    assert model.training is training and model.generation_config is own


def test_generation_defaults_of_the_model_are_ignored():
    model, keys = build_model("qwen2"), make_keys(3, 2)
    plain = _generate(model, keys)
    model.generation_config = GenerationConfig(
        temperature=0.1, top_k=2, do_sample=True, repetition_penalty=3.0, max_length=5, eos_token_id=list(range(37))
    )
    assert torch.equal(_generate(model, keys).completion_ids, plain.completion_ids)


def test_no_gradient_graph_is_kept_and_results_may_enter_one():
    rollout = _generate(build_model("qwen2"), make_keys(3, 1))
    assert not rollout.sampling_logprobs.requires_grad
    (rollout.sampling_logprobs * torch.ones(1, requires_grad=True)).sum().backward()


def test_should_stop_interrupts_and_restores():
    model, calls = build_model("qwen2"), []

    def stop() -> bool:
        calls.append(1)
        return len(calls) == 4

    with pytest.raises(RolloutInterrupted):
        _generate(model, make_keys(3, 1), should_stop=stop)
    assert len(calls) == 4 and model.training


@pytest.mark.parametrize("rows", [0, 2])
def test_progress_counts_tokens_and_finished_completions(rows):
    seen: list[tuple[int, int]] = []
    how = {"eos": (6, 20), "rows": rows, "progress": lambda *now: seen.append(now)}
    rollout = _generate(build_model("qwen2"), make_keys(3, 2), **how)
    assert seen == sorted(seen) and seen[-1] == (int(rollout.lengths.sum()), 6)
