"""Fused norms, gates and attention: the values of before, on a GPU (where there is none, interpreted) and a CPU."""

from functools import partial

import pytest
import torch

from grpo_pl.extras.kernels import fused_modules as module
from grpo_pl.extras.kernels.library import SWITCH
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.policy.lora import Lora, adapters_off, add_adapters
from tests.kernels import in_c, small_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
families = pytest.mark.parametrize("qwen3", [False, True], ids=["llama", "qwen3"])


def scored(model, *, segments=None):
    """Log-probabilities of ragged rows, and the gradient of every weight."""
    ids = torch.randint(1, 37, (4, 9), generator=torch.Generator().manual_seed(0)).to(model.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:2, 0] = mask[1, 6:] = mask[3, 5:] = False
    ids[1, :4], ids[3, :4] = ids[0, :4], ids[2, :4]  # two prompts
    logprobs, _ = completion_logprobs(
        model,
        prompt_ids=ids[:, :4],
        prompt_mask=mask[:, :4],
        completion_ids=ids[:, 4:],
        completion_mask=mask[:, 4:],
        action_mask=None if segments is None else mask[:, 4:] & (segments >= 0),
        segment_index=segments,
        temperature=1.0,
    )
    return logprobs, torch.autograd.grad(logprobs.mean(), [p for p in model.parameters() if p.requires_grad])


def assert_same(found, expected, atol=1e-5):
    torch.testing.assert_close(found[0], expected[0], atol=atol, rtol=atol)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert (ours - theirs).norm() <= atol * theirs.norm()


def count(monkeypatch, *names):
    """How often those functions of the module are called from now on."""
    calls = dict.fromkeys(names, 0)

    def counted(name, run, *args, **options):
        calls[name] += 1
        return run(*args, **options)

    for name in names:
        monkeypatch.setattr(module, name, partial(counted, name, getattr(module, name)))
    return calls


@families
def test_on_a_gpu_a_policy_scores_and_learns_as_before(monkeypatch, qwen3):
    pytest.importorskip("triton")
    model = small_model(qwen3=qwen3).to(DEVICE)
    monkeypatch.setenv(SWITCH, "torch")
    before = scored(model)
    calls = count(monkeypatch, "_feed_forward_on_gpu", "_norm_on_gpu")
    monkeypatch.setattr(module, "has_triton", lambda device: True)
    after, layers = scored(model), model.config.num_hidden_layers
    assert calls == {"_feed_forward_on_gpu": layers, "_norm_on_gpu": (4 if qwen3 else 2) * layers + 1}
    assert_same(after, before)
    assert not any("forward" in vars(each) for each in model.modules())


@in_c
@families
def test_on_a_cpu_a_policy_scores_and_learns_as_before(monkeypatch, qwen3):
    model = small_model(qwen3=qwen3)
    monkeypatch.setenv(SWITCH, "torch")
    calls = count(monkeypatch, "_feed_forward_on_cpu", "_norm_on_cpu", "_attention_on_cpu")
    before = scored(model)
    assert not any(calls.values())
    monkeypatch.delenv(SWITCH)
    after, layers = scored(model), model.config.num_hidden_layers
    norms = (4 if qwen3 else 2) * layers + 1
    assert calls == {"_feed_forward_on_cpu": layers, "_norm_on_cpu": norms, "_attention_on_cpu": layers}
    assert_same(after, before)
    assert not any("forward" in vars(each) for each in model.modules())


@in_c
def test_segments_are_sequences_of_their_own(monkeypatch):
    model, segments = small_model(), torch.tensor([[0, 0, -1, 1, 1]] * 4)
    found = scored(model, segments=segments)
    monkeypatch.setenv(SWITCH, "torch")
    assert_same(found, scored(model, segments=segments))
    assert (found[0] - scored(model)[0]).abs().max() > 0.01


@in_c
def test_weights_that_are_gathered_in_another_type_are_computed_as_before(monkeypatch):
    """FSDP2 may gather those of a float32 model in bfloat16."""
    model = small_model().bfloat16()
    before = scored(model)
    monkeypatch.setattr(module, "computes_in_c", lambda model: True)
    assert_same(scored(model), before)


@in_c
def test_adapters_learn_as_before(monkeypatch):
    add_adapters(model := small_model(), Lora(rank=2), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    found = scored(model)
    monkeypatch.setenv(SWITCH, "torch")
    assert_same(found, scored(model))


@in_c
def test_what_the_kernels_cannot_compute_is_computed_as_before(monkeypatch):
    """Widths that fill no vector, float64, autocast, and attention with dropout."""
    odd = small_model(heads=3, key_heads=1, head_size=8, intermediate=90)  # 24 wide
    double, dropped = small_model().double(), small_model().train()
    for layer in dropped.model.layers:
        layer.self_attn.attention_dropout = 0.5
    scored(dropped)  # how it can be scored is tried once, with a random state of its own

    def all_scored():
        torch.manual_seed(0)
        with_dropout = scored(dropped)
        with torch.autocast("cpu", torch.bfloat16):
            narrow = scored(small_model())
        return [scored(odd), scored(double), narrow, with_dropout]

    found = all_scored()
    monkeypatch.setenv(SWITCH, "torch")
    for ours, theirs in zip(found, all_scored(), strict=True):
        assert_same(ours, theirs)


def _adapted(**options):
    model = small_model().to(**options)
    add_adapters(model, Lora(rank=2, alpha=2.0), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return model


def test_what_adapters_add_is_rounded_with_the_product_and_not_behind_it():
    """In bfloat16 the neighbours of 1 are 1 and 1 + 1/128. W x is 1 + 3/8 of that step and B A x 2/8: together they are
    nearer to the second, while W x alone is rounded to 1, and so is its sum with 2/8 of a step."""
    model, step = _adapted(dtype=torch.bfloat16), 2**-7
    layer = model.model.layers[0].mlp.up_proj
    x = torch.zeros(1, 1, layer.in_features, dtype=torch.bfloat16)
    x[..., :2] = 1.0
    for parameter in layer.parameters():
        parameter.data.zero_()
    weight, down, up = layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight
    weight.data[:, 0], weight.data[:, 1] = 1.0, 3 / 8 * step
    down.data[0, 0], up.data[:, 0] = 1.0, 2 / 8 * step
    assert layer(x).unique().tolist() == [1.0]
    with module.patched(module.fused_forwards(model)):
        assert layer(x).unique().tolist() == [1.0 + step]
    assert layer(x).unique().tolist() == [1.0]


@pytest.mark.parametrize("autocast", [True, False])
def test_adapters_learn_in_few_bits_as_before(monkeypatch, autocast):
    """Up to rounding: their gradients by PEFT's own layers, and in float64."""
    model = _adapted(dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        calls = count(monkeypatch, "_linear_with_adapters")
        found = scored(model)
        assert calls["_linear_with_adapters"] == 14
        monkeypatch.setattr(module, "_adapted", lambda model: [])
        before = scored(model)
    exact = scored(model.double())
    errors = [
        [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(each[1], exact[1], strict=True)]
        for each in (found, before)
    ]
    assert max(errors[0]) < 0.1 and sum(errors[0]) < 1.1 * sum(errors[1])


def test_adapters_that_are_switched_off_are_left_out():
    model = _adapted(dtype=torch.bfloat16)
    with adapters_off(model):
        assert module.fused_forwards(model) == []
    assert len(module.fused_forwards(model)) == 14
