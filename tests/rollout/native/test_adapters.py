"""LoRA and QLoRA in the native engine: what adapters change reaches the sampler, however little it is."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from grpo_pl.extras.kernels.decode_kernel import built_kernels
from grpo_pl.extras.kernels.kernel_slots import KernelSlots
from grpo_pl.policy.lora import Lora, add_adapters, merged
from grpo_pl.policy.quantization import is_quantized, keep_form, nf4_config, plain
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.native.slots import LlamaFamilySlots, slot_decoder
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import Rollout
from tests.rollout.drawn import MODELS, UNEVEN, assert_same, build_model, generate, make_keys, scored

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test whose model silently went to the plain engine."""
    plain_draw = PlainEngine._draw

    def refuse(self: PlainEngine, *args: Any, **kwargs: Any) -> Any:
        assert not isinstance(self, NativeEngine), "the plain engine was asked"
        return plain_draw(self, *args, **kwargs)

    monkeypatch.setattr(PlainEngine, "_draw", refuse)


def _policy() -> PreTrainedModel:
    """Weights that bfloat16 holds exactly, and an A that sees what all inputs have in common: a change that is far
    below a step of bfloat16 at every weight then shows above the noise of its outputs."""
    kind, config, shape = MODELS["qwen2"]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1, "max_position_embeddings": 512}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = kind(config(**{**shape, **sizes}))
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(0.1)
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    add_adapters(model, Lora(rank=4), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.data.fill_(1 / 8)
    return model.eval()


def _set_b(model: PreTrainedModel, size: float) -> None:
    """Each number of B becomes ``size`` or ``-size``, as after a first step of AdamW with that learning rate."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.data = (size * signs).to(parameter.dtype)


def _sampled(model: PreTrainedModel, ids: Tensor, decoder: str, *, autocast: bool) -> Tensor:
    """(B, S, V) log-probabilities behind each token, as a decoder of the engine computes them."""
    slots: Any
    with torch.no_grad():
        if decoder == "torch":
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                slots = slot_decoder(model, rows=1)
            assert isinstance(slots, LlamaFamilySlots)
        else:
            slots = KernelSlots(built_kernels()[decoder], model, rows=1)
        logits = [torch.cat(list(slots.prompt_logits(row))) for row in ids.tolist()]
    return torch.stack(logits).double().log_softmax(dim=-1)


@torch.no_grad()
def _exact(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The same by transformers and PEFT in float64."""
    dtype = model.dtype
    found: Tensor = model.double()(ids).logits.log_softmax(dim=-1)
    model.to(dtype)
    return found


@pytest.mark.parametrize(
    ("how", "decoder"),
    [
        ("autocast", "torch"),
        ("bfloat16", "torch"),
        ("float32", "torch"),
        *(("float32", kernel) for kernel in list(built_kernels())[:1]),
    ],
)
def test_a_change_below_a_step_of_the_weights_reaches_the_sampler(how: str, decoder: str) -> None:
    """B A is 1e-4 where W is 0.1, whose neighbours in bfloat16 are 5e-4 away: the part of the change that arrives, by
    least squares over 151,552 log-probabilities, is 1 within 5 %; it was .51 where B A was added to W."""
    model, ids = _policy(), torch.randint(0, 37, (32, 128), generator=torch.Generator().manual_seed(0))
    if how == "bfloat16":
        model.bfloat16()
    changes = []
    for size in (4e-5, 0.0):
        _set_b(model, size)
        changes.append((_sampled(model, ids, decoder, autocast=how == "autocast"), _exact(model, ids)))
    (sampled, exact), (sampled_before, exact_before) = changes
    change, expected = sampled - sampled_before, exact - exact_before
    arrived = float((change * expected).sum() / expected.square().sum())
    assert arrived == pytest.approx(1.0, abs=0.05)


def _gap(model: PreTrainedModel, rollout: Rollout) -> float:
    """Mean |log-probability of the sampler - that of the trainer| of a rollout's tokens."""
    mask = rollout.completion_mask
    return float((scored(model, rollout, 1.0) - rollout.sampling_logprobs).abs()[mask].mean())


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_sampler_and_trainer_are_as_near_with_adapters_as_with_their_sum(how: str) -> None:
    """The same policies, with adapters and with these merged in float32 before they are drawn from."""
    gaps = {}
    for merges in (True, False):
        found = []
        for seed in range(3):
            model = build_model("qwen2", seed=seed)
            add_adapters(model, Lora(rank=4), seed=0)
            _set_b(model, 0.02)
            model = merged(model).train() if merges else model
            model = model.bfloat16() if how == "bfloat16" else model
            prompts, keys = [[p, p + 1, 3] for p in range(16)], make_keys(16, 8)
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                found.append(_gap(model, generate(NativeEngine(), model, prompts, keys, eos=(), length=32)))
        gaps[merges] = sum(found)
    assert 0 < gaps[False] < 1.1 * gaps[True]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_adapters_of_all_layers_in_bfloat16_draw_as_transformers_computes(family: str) -> None:
    """Three or two adapted layers are one product each, with biases, norms of heads and an untied head."""
    model = build_model(family).bfloat16()
    add_adapters(model, Lora(rank=3, alpha=4.0), seed=0)
    _set_b(model, 0.05)
    rollout = generate(NativeEngine(), model, UNEVEN, make_keys(3, 8), eos=())
    bare = scored(build_model(family), rollout, 1.0)
    forced = scored(model.float(), rollout, 1.0)
    assert (forced - rollout.sampling_logprobs).abs().mean() < 0.03  # bfloat16 keeps 8 bits of a logit near 4
    assert (forced - bare).abs().mean() > 0.1


def test_only_some_layers_may_have_adapters() -> None:
    model = build_model("qwen2").bfloat16()
    add_adapters(model, Lora(rank=4, targets=["k_proj", "up_proj"]), seed=0)
    _set_b(model, 0.1)
    rollout = generate(NativeEngine(), model, UNEVEN, make_keys(3, 8), eos=())
    assert (scored(model.float(), rollout, 1.0) - rollout.sampling_logprobs).abs().mean() < 0.03


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``quantized(dtype)``: a model whose layers are packed in 4 bits, with adapters, and its packed bytes."""

    def make(dtype: torch.dtype) -> PreTrainedModel:
        folder = tmp_path_factory.mktemp("base")
        sizes = {"hidden_size": 64, "intermediate_size": 128}
        kind, config, shape = MODELS["qwen2"]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            kind(config(**{**shape, **sizes})).save_pretrained(folder)
        model: PreTrainedModel = kind.from_pretrained(folder, dtype=dtype, quantization_config=nf4_config(dtype))
        add_adapters(model, Lora(rank=4), seed=0)
        keep_form(model)
        _set_b(model, 0.05)
        return model

    return make


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_four_bits_are_drawn_from_and_stay_as_they_are(quantized: Any, dtype: torch.dtype) -> None:
    model = quantized(dtype)
    packed = {name: weight.clone() for name, weight in model.named_parameters() if is_quantized(weight)}
    assert len(packed) == 14
    ours = generate(NativeEngine(), model, UNEVEN, make_keys(3, 8), eos=())
    if dtype == torch.float32:
        assert_same(ours, generate(PlainEngine(), model, UNEVEN, make_keys(3, 8), eos=()))
    mean = (scored(model, ours, 1.0) - ours.sampling_logprobs).abs().mean()
    assert mean < (1e-4 if dtype == torch.float32 else 0.03)
    after = dict(model.named_parameters())
    assert all(torch.equal(weight, after[name]) for name, weight in packed.items())


@needs_bitsandbytes
def test_a_layer_is_unpacked_for_its_product_and_no_longer(quantized: Any) -> None:
    """All that a decoder keeps of the layers is their packed weights and the adapters."""
    model = quantized(torch.bfloat16)
    decoder = slot_decoder(model, rows=1)
    assert isinstance(decoder, LlamaFamilySlots)
    layer = decoder._layers[0]
    held = [each for part in (layer.qkv, layer.output, layer.gate_up, layer.down) for each in vars(part).values()]
    assert not any(isinstance(each, Tensor) and each.is_floating_point() for each in held)
    attention = model.model.layers[0].self_attn
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = []
    for module in (attention.q_proj, attention.k_proj, attention.v_proj):
        weight = plain(module.base_layer.weight).double()
        weight = weight + module.get_delta_weight("default").double()
        expected.append(F.linear(x.double(), weight, module.base_layer.bias.double()))
    found = layer.qkv(x).double()
    torch.testing.assert_close(found, torch.cat(expected, dim=1)[:, decoder._order], atol=0.02, rtol=2**-7)
