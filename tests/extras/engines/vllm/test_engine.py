"""vLLM draws our samples, from the weights of the moment, and says clearly what it cannot do."""

import os
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_pl.functional.sampling import Noise, score_gaps, token_keys
from grpo_pl.policy.lora import Lora, add_adapters
from grpo_pl.rollout.decoding import row_keys
from grpo_pl.rollout.engine import PolicyDiverged, RolloutInterrupted
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import Rollout, StopStrings
from tests.extras.engines.vllm.conftest import MARKS
from tests.rollout.drawn import assert_same, generate, make_keys, scored

pytestmark = MARKS
_generate = partial(generate, length=64)


def _prompts(count: int, length: int = 9) -> list[list[int]]:
    """Of different lengths and contents."""
    return [[(7 * p + 3 * t) % 99 + 1 for t in range(length - p % 4)] for p in range(count)]


@pytest.fixture(scope="module")
def tied(build_policy: Any, make_vllm: Any) -> tuple[PreTrainedModel, Any]:
    """A policy with tied embeddings and its engine, shared by most tests here."""
    return build_policy("qwen2"), make_vllm()


# --- draws --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [{"temperature": 0.7}, {}, {"temperature": 1.3}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}],
    ids=str,
)
def test_draws_the_samples_of_the_native_engine(tied: Any, how: dict[str, Any]) -> None:
    model, engine = tied
    prompts, keys = _prompts(8), make_keys(8, 8)
    ours = _generate(engine, model, prompts, keys, eos=(), **how)
    assert ours.completion_ids.shape == (64, 64)
    assert_same(ours, _generate(NativeEngine(), model, prompts, keys, eos=(), **how))


def test_end_tokens_end_rows_and_count_as_theirs(tied: Any) -> None:
    model, engine = tied
    prompts, keys = _prompts(5), make_keys(5, 4)
    ours = _generate(engine, model, prompts, keys, length=40)
    assert_same(ours, _generate(NativeEngine(), model, prompts, keys, length=40))
    assert {"stop", "length"} == set(ours.finish_reasons)


def test_stop_strings_end_rows_with_the_token_that_completes_one(tied: Any, tokenizer: Any) -> None:
    model, engine = tied
    prompts, keys = _prompts(5), make_keys(5, 4)
    stops = StopStrings(texts=("7", "ab", "*"), tokenizer=tokenizer)
    ours = _generate(engine, model, prompts, keys, stops=stops, eos=())
    assert_same(ours, _generate(NativeEngine(), model, prompts, keys, stops=stops, eos=()))
    assert "stop" in ours.finish_reasons


def test_captured_logprobs_are_those_of_teacher_forcing(tied: Any) -> None:
    model, engine = tied
    rollout = _generate(engine, model, _prompts(4), make_keys(4, 4), temperature=1.3)
    forced = scored(model, rollout, 1.3)
    kept = rollout.completion_mask
    assert (forced - rollout.sampling_logprobs)[kept].abs().max() < 1e-4
    assert not rollout.sampling_logprobs[~kept].any()


@pytest.mark.parametrize("top", [1, 5, 25, 100, 107])
def test_the_likeliest_tokens_are_recorded_as_by_the_native_engine(tied: Any, top: int) -> None:
    model, engine = tied
    prompts, keys, how = _prompts(4), make_keys(4, 4), {"temperature": 1.3, "top_logprobs": top, "length": 20}
    ours, theirs = (_generate(one, model, prompts, keys, **how) for one in (engine, NativeEngine()))
    assert_same(ours, theirs, but=("top_ids", "top_logprobs"))
    assert ours.top_ids is not None and ours.top_ids.shape[2] == min(top, model.config.vocab_size)
    assert torch.equal(ours.top_ids == -1, theirs.top_ids == -1)
    finite = theirs.top_logprobs > -torch.inf  # type: ignore[operator]
    assert (ours.top_logprobs - theirs.top_logprobs)[finite].abs().max() < 1e-4  # type: ignore[operator]
    assert (ours.top_ids == theirs.top_ids).double().mean() > 0.99  # but for ties of likely tokens
    assert _generate(engine, model, prompts, keys, **how | {"temperature": 0.0}).top_ids is None


def test_beside_a_truncation_the_likeliest_tokens_are_those_that_it_left(tied: Any) -> None:
    model, engine = tied
    how = {"top_k": 3, "top_logprobs": 5, "length": 20}
    ours, theirs = (_generate(one, model, _prompts(4), make_keys(4, 4), **how) for one in (engine, NativeEngine()))
    assert torch.equal(ours.top_ids, theirs.top_ids)  # type: ignore[arg-type]
    assert (ours.top_ids[ours.action_mask][:, 3:] == -1).all()  # type: ignore[index]


@pytest.mark.slow
def test_rows_that_wait_or_are_computed_again_are_drawn_all_the_same(build_policy: Any, make_vllm: Any) -> None:
    """Eight rows at a time, a cache too small for them, prompts read in pieces; no more tokens than it was made for."""
    model = build_policy("qwen2", num_hidden_layers=8, num_key_value_heads=2, max_position_embeddings=600)
    one_row = 8 * 2 * 2 * 32 * 4 * 640  # bytes
    cache = {"kv_cache_gib": 2.5 * one_row / 2**30, "engine_args": {"max_num_batched_tokens": 64}}
    engine = make_vllm(max_batch_rows=8, max_tokens=400, **cache)
    prompts, keys = _prompts(3, length=150), make_keys(3, 4)
    ours = _generate(engine, model, prompts, keys, eos=(), length=200)
    assert_same(ours, _generate(NativeEngine(), model, prompts, keys, eos=(), length=200))
    with pytest.raises(ValueError, match=r"may have 401 tokens, the engine's limit is 400"):
        _generate(engine, model, prompts, keys, length=251)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_near_ties_are_the_only_difference_over_many_samples(tied: Any, temperature: float) -> None:
    model, engine = tied
    prompts, keys = _prompts(64), make_keys(64, 8)
    ours = _generate(engine, model, prompts, keys, eos=(), temperature=temperature)
    reference = _generate(NativeEngine(), model, prompts, keys, eos=(), temperature=temperature)
    differs = ours.completion_ids != reference.completion_ids
    rows = differs.any(dim=1).nonzero().flatten().tolist()
    print(f"{512 - len(rows)} of 512 rows are equal at temperature {temperature}")
    assert len(rows) <= 10
    names = row_keys(keys)
    for row in rows:
        position = int(differs[row].nonzero()[0])
        gap = _score_gap(model, reference, row, position, names[row], temperature)
        print(f"row {row}, token {position}: the two best scores lie {gap:.1e} apart")
        assert gap < 1e-4


def _score_gap(
    model: PreTrainedModel, rollout: Rollout, row: int, position: int, key: int, temperature: float
) -> float:
    """By how much the token that was drawn won its race."""
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
    with torch.no_grad():
        logits = model(torch.cat([prompt, rollout.completion_ids[row, :position]]).unsqueeze(0)).logits[0, -1]
    noise = Noise(token_keys(torch.tensor([key]), position))
    return score_gaps(logits.unsqueeze(0), noise, temperature=temperature).item()


# --- weights ------------------------------------------------------------------------------------------------------


def _disturb(model: PreTrainedModel, seed: int = 1) -> None:
    """As an update would, but so that hardly a token stays the same."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def _assert_greedy_follows_pushes(engine: Any, model: PreTrainedModel, reference: Any) -> None:
    prompts, keys = _prompts(16), make_keys(16, 1)
    for number in range(3):
        ours = _generate(engine, model, prompts, keys, length=24, eos=(), temperature=0.0)
        wanted = _generate(reference, model, prompts, keys, length=24, eos=(), temperature=0.0)
        right = (ours.completion_ids == wanted.completion_ids).all(dim=1).sum()
        assert right == 16, f"{right} of 16 greedy completions are right after push {number + 1}"
        _disturb(model, number)
        engine.update_weights(model)


def test_every_push_arrives_whole(tied: Any) -> None:
    model, engine = tied
    _assert_greedy_follows_pushes(engine, model, PlainEngine())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "mixtral"])
def test_every_push_arrives_whole_in_other_families(build_policy: Any, make_vllm: Any, family: str) -> None:
    engine = make_vllm()
    _assert_greedy_follows_pushes(engine, build_policy(family), PlainEngine())
    engine.close()


@pytest.mark.slow
def test_adapters_are_merged_into_what_is_pushed(build_policy: Any, make_vllm: Any) -> None:
    model, engine = build_policy("llama"), make_vllm()
    add_adapters(model, Lora(rank=4), seed=0)
    _disturb(model)
    _assert_greedy_follows_pushes(engine, model, PlainEngine())
    engine.close()


def test_keys_and_values_of_former_weights_are_forgotten(tied: Any) -> None:
    """Prompts of several blocks of the cache, whose keys and values vLLM would find again."""
    model, engine = tied
    prompts, keys = _prompts(2, length=300), make_keys(2, 4)
    _generate(engine, model, prompts, keys, length=8)
    _disturb(model)
    engine.update_weights(model)
    ours = _generate(engine, model, prompts, keys, length=8)
    assert_same(ours, _generate(NativeEngine(), model, prompts, keys, length=8))


@pytest.mark.slow
def test_a_push_of_three_million_weights_takes_little_time(build_policy: Any, make_vllm: Any) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = build_policy("qwen2", **shape, num_key_value_heads=8)
    engine = make_vllm()
    assert 2.5e6 < sum(p.numel() for p in model.parameters()) < 3.5e6
    _generate(engine, model, [[1]], make_keys(1, 1), length=1)
    seconds = []
    for _ in range(5):
        engine.update_weights(model)
        start = time.perf_counter()
        engine._push(model)
        seconds.append(time.perf_counter() - start)
    print(f"pushes took {', '.join(f'{1000 * s:.0f}' for s in seconds)} ms")
    assert min(seconds) < 2.0  # only what hangs is refused here
    engine.close()


# --- manners ------------------------------------------------------------------------------------------------------


def test_an_engine_that_rests_gets_weights_and_draws_as_before(tied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child is asked to sleep and is woken; on a CPU vLLM takes both calls, and frees nothing."""
    model, engine = tied
    prompts, keys = _prompts(4), make_keys(4, 2)
    before, pushes, child = _generate(engine, model, prompts, keys), engine.pushes, engine.pid
    engine.rest()
    assert_same(_generate(engine, model, prompts, keys), before)
    assert engine.pushes == pushes  # it was not asked to
    monkeypatch.setattr(engine, "sleep", True)
    for _ in range(2):
        engine.rest()
        assert_same(_generate(engine, model, prompts, keys), before)
    assert engine.pushes == pushes + 2 and engine.pid == child


def test_progress_is_told_and_a_stopped_rollout_leaves_nothing_behind(tied: Any) -> None:
    model, engine = tied
    engine.update_weights(model)
    prompts, keys = _prompts(4), make_keys(4, 4)
    seen: list[tuple[int, int]] = []
    whole = _generate(engine, model, prompts, keys, progress=lambda *now: seen.append(now))
    assert seen == sorted(seen) and seen[-1] == (int(whole.lengths.sum()), 16)
    with pytest.raises(RolloutInterrupted):
        _generate(engine, model, prompts, keys, length=400, eos=(), should_stop=lambda: True)
    assert_same(_generate(engine, model, prompts, keys), whole)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_lose_and_double_nothing(build_policy: Any, make_vllm: Any) -> None:
    model, engine = build_policy("qwen2"), make_vllm()
    prompts, keys = _prompts(8), make_keys(8, 8)
    reference = _generate(NativeEngine(), model, prompts, keys, length=400, eos=())
    _generate(engine, model, prompts, keys, length=1)
    for number in range(20):
        victim = engine.pid
        killer = threading.Timer(0.05 + 0.1 * number, os.kill, (victim, signal.SIGKILL))
        killer.start()
        assert_same(_generate(engine, model, prompts, keys, length=400, eos=()), reference)
        killer.join()
    engine.close()


def test_rows_take_what_the_context_holds(tied: Any) -> None:
    """As turns of episodes ask for it: what one row has room for is too much for another."""
    model, engine = tied
    engine.update_weights(model)
    long, short = _prompts(1, length=500)[0], _prompts(1)[0]
    keys = make_keys(2, 1)
    ours = _generate(engine, model, [long, short], keys, eos=())
    assert ours.lengths.tolist() == [12, 64] and list(ours.finish_reasons) == ["length", "length"]
    alone = _generate(NativeEngine(), model, [long], keys[:1], eos=(), length=12)
    assert torch.equal(ours.completion_ids[:1, :12], alone.completion_ids)
    alone = _generate(NativeEngine(), model, [short], keys[1:], eos=())
    assert torch.equal(ours.completion_ids[1:], alone.completion_ids)


def test_weights_that_are_not_finite_are_told(build_policy: Any, tied: Any) -> None:
    model, engine = build_policy("qwen2"), tied[1]
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    engine.update_weights(model)
    with pytest.raises(PolicyDiverged):
        _generate(engine, model, _prompts(2), make_keys(2, 2))
    engine.update_weights(tied[0])
    _generate(engine, tied[0], _prompts(2), make_keys(2, 2))


def test_a_policy_that_vllm_has_no_kernel_for_is_refused_in_one_line(build_policy: Any, make_vllm: Any) -> None:
    engine = make_vllm()
    with pytest.raises(ValueError, match=r"^vLLM cannot run this policy \(qwen2, 512 tokens, float32\): .*head_dim=16"):
        _generate(engine, build_policy("qwen2", head_dim=16, hidden_size=32), _prompts(1), make_keys(1, 1))
    engine.close()


@pytest.mark.slow
def test_an_argument_that_vllm_does_not_know_is_refused(build_policy: Any, make_vllm: Any) -> None:
    engine = make_vllm(engine_args={"enforce_eagre": True})
    with pytest.raises(ValueError, match=r"no argument 'enforce_eagre'; did you mean enforce_eager\?"):
        _generate(engine, build_policy("qwen2"), _prompts(1), make_keys(1, 1))
    engine.close()
