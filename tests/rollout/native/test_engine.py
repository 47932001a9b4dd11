"""Tests of the native engine: the plain engine's samples, at any batch shape, from the weights of the moment."""

import logging
import random
from dataclasses import replace

import pytest
import torch

from grpo_pl.extras.kernels.decode_kernel import built_kernels
from grpo_pl.rollout.engine import RolloutInterrupted
from grpo_pl.rollout.native.decoder_choice import SWITCH
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from tests.rollout.drawn import UNEVEN, assert_same, build_model, generate, make_keys, scored

OWN = ["llama", "qwen2", "qwen3", "mistral"]


@pytest.fixture(params=["torch", "kernel"], autouse=True)
def decoder(request, monkeypatch) -> str:
    """Every test holds for both: the own forward pass in torch, and the fastest decode kernel of this processor."""
    if request.param == "kernel" and not built_kernels():
        pytest.skip("no C compiler has built the decode kernel")
    monkeypatch.setenv(SWITCH, "torch" if request.param == "torch" else next(iter(built_kernels())))
    return request.param


torch_alone = pytest.mark.parametrize("decoder", ["torch"], indirect=True)  # what no kernel computes


@pytest.fixture
def no_fallback(monkeypatch):
    """Fails a test whose model silently went to the plain engine."""

    plain = PlainEngine._draw

    def refuse(self, *args, **kwargs):
        assert not isinstance(self, NativeEngine), "the plain engine was asked"
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(PlainEngine, "_draw", refuse)


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.3}]
)
def test_draws_the_samples_of_the_plain_engine(no_fallback, family, how):
    model, keys = build_model(family), make_keys(3, 5)
    assert_same(
        generate(NativeEngine(), model, UNEVEN, keys, **how), generate(PlainEngine(), model, UNEVEN, keys, **how)
    )


def test_near_ties_are_the_only_difference_over_many_samples(no_fallback):
    """4,096 tokens: a draw differs only where rounding swaps the two best scores of its race."""
    model, keys = build_model("qwen2"), make_keys(16, 8)
    requests = [[p + 1, 2 * p % 37, 3] for p in range(16)]
    ours = generate(NativeEngine(), model, requests, keys, eos=(), length=32)
    reference = generate(PlainEngine(), model, requests, keys, eos=(), length=32)
    differing_rows = (ours.completion_ids != reference.completion_ids).any(dim=1).sum()
    assert differing_rows <= 1


def test_prompts_are_prefilled_in_slices_when_they_are_many(no_fallback, monkeypatch):
    model, keys = build_model("qwen2"), make_keys(3, 4)
    whole = generate(NativeEngine(), model, UNEVEN, keys)
    monkeypatch.setattr("grpo_pl.rollout.native.llama_family._PREFILL_TOKENS", 14)  # two prompts a slice
    assert_same(generate(NativeEngine(), model, UNEVEN, keys), whole)


def test_weights_updated_in_place_are_seen_at_once(no_fallback):
    model, keys, engine = build_model("qwen2"), make_keys(3, 4), NativeEngine()
    before = generate(engine, model, UNEVEN, keys)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    after = generate(engine, model, UNEVEN, keys)
    assert not torch.equal(before.completion_ids, after.completion_ids)
    assert_same(after, generate(PlainEngine(), model, UNEVEN, keys))


def test_model_is_left_as_it_was(no_fallback):
    model = build_model("qwen2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generate(NativeEngine(), model, UNEVEN, make_keys(3, 2))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_progress_and_interruption(no_fallback, decoder):
    model, seen, asked = build_model("qwen2"), [], []
    enough = 3 if decoder == "torch" else 1  # the kernel asks before it starts, and every few milliseconds
    rollout = generate(
        NativeEngine(max_batch_rows=4), model, UNEVEN, make_keys(3, 4), progress=lambda *now: seen.append(now)
    )
    assert seen == sorted(seen) and seen[-1] == (int(rollout.lengths.sum()), 12)

    def stop() -> bool:
        asked.append(1)
        return len(asked) == enough

    with pytest.raises(RolloutInterrupted):
        generate(NativeEngine(), model, UNEVEN, make_keys(3, 4), should_stop=stop)
    assert len(asked) == enough


@torch_alone
def test_bfloat16_policy_is_decoded_in_bfloat16(no_fallback):
    model, keys = build_model("qwen2").bfloat16(), make_keys(3, 8)
    rollout = generate(NativeEngine(), model, UNEVEN, keys, eos=())
    assert rollout.sampling_logprobs.dtype == torch.float32
    forced = scored(model.float(), rollout, 1.0)
    assert (forced - rollout.sampling_logprobs).abs().mean() < 0.03  # bfloat16 keeps 8 bits of a logit near 4


@torch_alone
def test_a_run_in_bfloat16_alone_keeps_logprobs_in_float32(no_fallback):
    """``Trainer(precision="bf16-true")`` makes bfloat16 the default type of new tensors."""
    model, keys = build_model("qwen2").bfloat16(), make_keys(3, 8)
    expected = generate(NativeEngine(), model, UNEVEN, keys, eos=())
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = generate(NativeEngine(), model, UNEVEN, keys, eos=())
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.sampling_logprobs.dtype == torch.float32
    assert_same(found, expected)


@torch_alone
def test_autocast_decodes_in_its_type(no_fallback):
    model, keys = build_model("qwen2"), make_keys(3, 8)
    exact = generate(NativeEngine(), model, UNEVEN, keys, eos=(), length=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = generate(NativeEngine(), model, UNEVEN, keys, eos=(), length=1)
    same = exact.completion_ids == rounded.completion_ids
    difference = (exact.sampling_logprobs - rounded.sampling_logprobs)[same].abs()
    assert same.float().mean() > 0.8 and 0 < difference.max() < 0.2


@torch_alone
def test_float64_policy_keeps_its_precision(no_fallback):
    model, keys = build_model("qwen2").double(), make_keys(3, 4)
    assert_same(generate(NativeEngine(), model, UNEVEN, keys), generate(PlainEngine(), model, UNEVEN, keys))


def test_diverged_policy_is_refused(no_fallback):
    model = build_model("qwen2")
    model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        generate(NativeEngine(), model, UNEVEN, make_keys(3, 2))


def test_known_architecture_says_so(caplog, decoder):
    what = {
        "torch": "the own forward pass of the Llama family",
        "kernel": f"the decode kernel ({next(iter(built_kernels()), '')})",
    }
    with caplog.at_level(logging.INFO, logger="grpo_pl.rollout.native.engine"):
        generate(NativeEngine(), build_model("qwen2"), UNEVEN, make_keys(3, 2))
    assert caplog.messages == [f"rollouts of Qwen2ForCausalLM run on {what[decoder]}."]


def test_wide_sliding_window_keeps_the_own_forward_pass(no_fallback):
    model = build_model("mistral")
    model.config.sliding_window = 21  # 7 prompt and 14 completion tokens
    generate(NativeEngine(), model, UNEVEN, make_keys(3, 2))


def _with_lora(model, **options):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.3, **options)
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return wrapped


def test_lora_adapters_count_and_can_be_switched_off(no_fallback):
    model, keys, engine = _with_lora(build_model("qwen2")), make_keys(3, 4), NativeEngine()
    adapted = generate(engine, model, UNEVEN, keys)
    assert_same(adapted, generate(PlainEngine(), model, UNEVEN, keys))
    with model.disable_adapter():
        bare = generate(engine, model, UNEVEN, keys)
    assert not torch.equal(adapted.completion_ids, bare.completion_ids)
    assert_same(bare, generate(PlainEngine(), build_model("qwen2"), UNEVEN, keys))
    model.merge_adapter()
    assert_same(generate(engine, model, UNEVEN, keys), adapted)


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
OTHERS = {
    "GPT2LMHeadModel has no own forward pass": ("gpt2", lambda m: m),
    "21 tokens exceed its sliding attention window": ("mistral", lambda m: setattr(m.config, "sliding_window", 8)),
    "its rotary embedding of type 'dynamic'": ("qwen2", lambda m: setattr(m.config, "rope_parameters", DYNAMIC)),
    "hooks or patches": ("qwen2", lambda m: m.model.norm.register_forward_hook(lambda _, args, output: output * 1.5)),
    "wrapped as Doubled": ("qwen2", lambda m: setattr(m.model.layers[1].mlp.down_proj, "__class__", Doubled)),
    "DoRA": ("qwen2", lambda m: _with_lora(m, use_dora=True)),
}


@torch_alone
@pytest.mark.parametrize("reason", OTHERS)
def test_what_the_own_pass_does_not_compute_goes_to_the_plain_engine_with_one_line(caplog, reason):
    family, change = OTHERS[reason]
    model, keys, engine = build_model(family), make_keys(3, 2), NativeEngine()
    changed = change(model)
    model = changed if isinstance(changed, torch.nn.Module) else model
    with caplog.at_level(logging.INFO, logger="grpo_pl.rollout.native.engine"):
        ours, _ = (generate(engine, model, UNEVEN, keys) for _ in range(2))
    assert_same(ours, generate(PlainEngine(), model, UNEVEN, keys))
    assert len(caplog.messages) == 1 and reason in caplog.messages[0]


@pytest.mark.parametrize("family", OWN)
def test_contexts_go_on_from_what_was_kept_or_begin_anew(family):
    """Rows that rest, leave, are cut short or come new: each draws what its whole context draws."""
    model, rng, key = build_model(family), random.Random(1), make_keys(1, 1)[0][0]
    kept = NativeEngine().continuing(model, rows=12)
    contexts = {i: [5, 9, 1 + i // 4] for i in range(10)}
    for turn in range(5):
        prompts, keys = list(contexts.values()), [[replace(key, sample=i, turn=turn)] for i in contexts]
        ours, reference = (generate(engine, model, prompts, keys, length=9) for engine in (kept, PlainEngine()))
        assert torch.equal(ours.completion_ids, reference.completion_ids)
        torch.testing.assert_close(ours.sampling_logprobs, reference.sampling_logprobs, rtol=1e-4, atol=1e-4)
        for row, i in enumerate(list(contexts)):
            used = int(ours.lengths[row]) - (i == 4 and int(ours.lengths[row]) > 1)  # one is cut
            contexts[i] = contexts[i] + ours.completion_ids[row, :used].tolist() + rng.choices(range(37), k=turn + 1)
            if rng.random() < 0.15:
                del contexts[i]
        if turn == 1:
            contexts = {20: [7, 7, 7, 7], **contexts, 21: [5, 9, 1]}  # in front and behind


@pytest.mark.parametrize("decoder", ["kernel"], indirect=True)
def test_a_turn_has_the_bits_of_a_rollout_where_a_kernel_draws(decoder):
    """Torch, which would draw the same tokens slower, rounds otherwise."""
    model, key, contexts = build_model("qwen2"), make_keys(1, 1)[0][0], [[5, 9, i] for i in range(8)]
    keys = [[replace(key, sample=i)] for i in range(8)]
    engines = NativeEngine().continuing(model, rows=8), NativeEngine()
    turn, whole = (generate(engine, model, contexts, keys, length=9) for engine in engines)
    assert torch.equal(turn.completion_ids, whole.completion_ids)
    assert torch.equal(turn.sampling_logprobs, whole.sampling_logprobs)
