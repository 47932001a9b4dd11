"""Tests of the plain engine, the one that others are checked against."""

import pytest
import torch
from transformers import GenerationConfig

from grpo_pl.functional.sampling import Noise, draw_tokens, row_key, token_keys
from grpo_pl.rollout.engine import RolloutInterrupted
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import GenerateRequest, Rollout, SamplingParams

PAD = 0


def _generate(model, prompts, keys, *, eos=(), max_length=12, temperature=1.0, pad=PAD, rows=0, **options) -> Rollout:
    top_k, top_p = options.pop("top_k", 0), options.pop("top_p", 1.0)
    return PlainEngine(max_batch_rows=rows).generate(
        model,
        GenerateRequest(
            prompt_ids=prompts,
            keys=keys,
            sampling=SamplingParams(
                max_completion_length=max_length, temperature=temperature, top_k=top_k, top_p=top_p
            ),
            eos_token_ids=list(eos),
            pad_token_id=pad,
        ),
        **options,
    )


def _replay(model, prompt, key, *, max_length, eos, temperature) -> tuple[list[int], list[float]]:
    """One sample token by token, without cache, padding or neighbours."""
    tokens: list[int] = []
    logprobs: list[float] = []
    hashed = torch.tensor([row_key(key.seed, key.split, key.step, key.attempt, key.prompt_id, key.sample)])
    for position in range(max_length):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[:, -1]
        token, logprob = draw_tokens(logits, Noise(token_keys(hashed, position)), temperature=temperature)
        tokens.append(token.item())
        logprobs.append(logprob.item())
        if tokens[-1] in eos:
            break
    return tokens, logprobs


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_each_completion_is_a_function_of_its_key_alone(build_model, make_keys, prompts, family):
    """Padding, cache and neighbours change nothing; GPT-2 has absolute positions, so padding must not shift them."""
    model, keys, eos = build_model(family), make_keys(3, 4), (6, 20)
    rollout = _generate(model, prompts, keys, eos=eos, temperature=0.9)
    model.eval()
    for p, prompt in enumerate(prompts):
        for g in range(4):
            row = p * 4 + g
            tokens, logprobs = _replay(model, prompt, keys[p][g], max_length=12, eos=eos, temperature=0.9)
            length = int(rollout.completion_mask[row].sum())
            assert rollout.completion_ids[row, :length].tolist() == tokens
            torch.testing.assert_close(
                rollout.sampling_logprobs[row, :length], torch.tensor(logprobs), atol=1e-4, rtol=0.0
            )
    assert len({tuple(row) for row in rollout.completion_ids.tolist()}) > 6  # samples of a group differ


def test_rollout_has_the_promised_shape(build_model, make_keys, prompts):
    rollout = _generate(build_model("qwen2"), prompts, make_keys(3, 2), eos=(6, 20), max_length=15)
    assert rollout.prompt_ids.shape == (6, 7) and rollout.prompt_ids[2].tolist() == [PAD] * 6 + [2]
    assert rollout.prompt_mask.sum(dim=1).tolist() == [7, 7, 1, 1, 4, 4]
    for ids, mask, logprobs, reason in zip(
        rollout.completion_ids.tolist(),
        rollout.completion_mask.tolist(),
        rollout.sampling_logprobs.tolist(),
        rollout.finish_reasons,
        strict=True,
    ):
        length = sum(mask)
        assert mask == [True] * length + [False] * (len(mask) - length)
        assert all(token not in (6, 20) for token in ids[: length - 1])
        assert (ids[length - 1] in (6, 20)) == (reason == "stop")
        assert ids[length:] == [PAD] * (len(ids) - length) and logprobs[length:] == [0.0] * (len(ids) - length)
    assert set(rollout.finish_reasons) == {"stop", "length"}
    assert rollout.completion_ids.shape[1] == rollout.lengths.max()


def test_padding_may_equal_an_end_token(build_model, make_keys, prompts):
    model, keys = build_model("qwen2"), make_keys(3, 3)
    apart = _generate(model, prompts, keys, eos=(6, 20), pad=PAD)
    same = _generate(model, prompts, keys, eos=(6, 20), pad=20)
    assert torch.equal(apart.completion_mask, same.completion_mask)
    assert torch.equal(apart.completion_ids[apart.completion_mask], same.completion_ids[same.completion_mask])
    assert apart.finish_reasons == same.finish_reasons


def test_without_end_tokens_every_completion_has_full_length(build_model, make_keys, prompts):
    rollout = _generate(build_model("qwen2"), prompts, make_keys(3, 2), max_length=9)
    assert rollout.completion_mask.all() and rollout.completion_ids.shape == (6, 9)
    assert rollout.finish_reasons == ["length"] * 6


def test_greedy_completions_of_a_group_are_equal(build_model, make_keys, prompts):
    model = build_model("qwen2")
    rollout = _generate(model, prompts, make_keys(3, 2), temperature=0.0, max_length=6)
    assert torch.equal(rollout.completion_ids[::2], rollout.completion_ids[1::2])
    reference = model.eval().generate(
        torch.tensor([prompts[0]]),
        generation_config=GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0),
    )
    assert rollout.completion_ids[0].tolist() == reference[0, len(prompts[0]) :].tolist()


def test_top_k_of_one_is_greedy_and_top_p_truncates(build_model, make_keys, prompts):
    model, keys = build_model("qwen2"), make_keys(3, 2)
    greedy = _generate(model, prompts, keys, temperature=0.0)
    assert torch.equal(_generate(model, prompts, keys, top_k=1).completion_ids, greedy.completion_ids)
    assert torch.equal(_generate(model, prompts, keys, top_p=1e-6).completion_ids, greedy.completion_ids)
    assert not torch.equal(_generate(model, prompts, keys, top_p=0.9).completion_ids, greedy.completion_ids)


def test_chunks_of_rows_draw_the_same_samples(build_model, make_keys, prompts):
    model, keys = build_model("qwen2"), make_keys(3, 4)
    whole = _generate(model, prompts, keys, eos=(6, 20))
    chunked = _generate(model, prompts, keys, eos=(6, 20), rows=5)
    assert torch.equal(whole.completion_ids, chunked.completion_ids)
    torch.testing.assert_close(whole.sampling_logprobs, chunked.sampling_logprobs, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_generation_defaults_are_restored(build_model, make_keys, prompts, training):
    model = build_model("qwen2").train(training)
    own = model.generation_config
    _generate(model, prompts, make_keys(3, 1))
    assert model.training is training and model.generation_config is own


def test_generation_defaults_of_the_model_are_ignored(build_model, make_keys, prompts):
    model, keys = build_model("qwen2"), make_keys(3, 2)
    plain = _generate(model, prompts, keys)
    model.generation_config = GenerationConfig(
        temperature=0.1, top_k=2, do_sample=True, repetition_penalty=3.0, max_length=5, eos_token_id=list(range(37))
    )
    assert torch.equal(_generate(model, prompts, keys).completion_ids, plain.completion_ids)


def test_no_gradient_graph_is_kept_and_results_may_enter_one(build_model, make_keys, prompts):
    rollout = _generate(build_model("qwen2"), prompts, make_keys(3, 1))
    assert not rollout.sampling_logprobs.requires_grad
    (rollout.sampling_logprobs * torch.ones(1, requires_grad=True)).sum().backward()


def test_should_stop_interrupts_and_restores(build_model, make_keys, prompts):
    model, calls = build_model("qwen2"), []

    def stop() -> bool:
        calls.append(1)
        return len(calls) == 4

    with pytest.raises(RolloutInterrupted):
        _generate(model, prompts, make_keys(3, 1), should_stop=stop)
    assert len(calls) == 4 and model.training


@pytest.mark.parametrize("rows", [0, 2])
def test_progress_counts_tokens_and_finished_completions(build_model, make_keys, prompts, rows):
    seen: list[tuple[int, int]] = []
    rollout = _generate(
        build_model("qwen2"),
        prompts,
        make_keys(3, 2),
        eos=(6, 20),
        rows=rows,
        progress=lambda tokens, finished: seen.append((tokens, finished)),
    )
    assert seen == sorted(seen)
    assert seen[-1] == (int(rollout.lengths.sum()), 6)


def test_policy_without_finite_logits_is_refused(build_model, make_keys, prompts):
    model = build_model("qwen2")
    model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        _generate(model, prompts, make_keys(3, 1))
