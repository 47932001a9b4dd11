"""The decoder and the draw of GPUs, on one where there is one, else interpreted on the CPU: the samples of torch."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from grpo_pl.extras.kernels.graph_decoder import GraphDecoder
from grpo_pl.functional import accelerated, sampling
from grpo_pl.policy.lora import Lora, adapters_off, add_adapters
from grpo_pl.rollout.native import engine as native_engine
from grpo_pl.rollout.native.decoder_choice import SWITCH
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from tests.rollout.drawn import UNEVEN, assert_same, build_model, generate, make_keys, scored

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_generate = partial(generate, length=20)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[GraphDecoder]:
    """The native engine decodes and draws as on a GPU; the decoders that it makes."""
    made: list[GraphDecoder] = []

    class Watched(GraphDecoder):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setenv(SWITCH, "torch")
    monkeypatch.setattr(accelerated, "GraphDecoder", Watched)
    monkeypatch.setattr(native_engine, "decodes_in_graphs", lambda model: True)
    monkeypatch.setattr(sampling, "has_triton", lambda device: True)
    return made


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {"eos": ()}),
        ("mistral", {"temperature": 0.6}),
        ("qwen2", {"temperature": 0.0}),
        ("qwen2", {"eos": (6,)}),
        ("qwen3", {}),
        ("qwen2", {"top_k": 5}),
        ("qwen2", {"top_p": 0.8, "temperature": 1.3}),
        ("qwen2", {"top_k": 5, "sampling_mask": True}),
        ("qwen2", {"top_p": 0.5, "sampling_mask": True}),
        ("qwen2", {"top_logprobs": 3}),
        ("qwen2", {"limits": [[17], [1], [16]], "eos": ()}),
    ],
)
def test_draws_the_samples_of_the_plain_engine(graphs, family, how):
    """Of prompts of three lengths, with completions that end before and behind a look after 16 tokens."""
    model, keys = build_model(family).to(DEVICE), make_keys(3, 1)
    ours = _generate(NativeEngine(), model, UNEVEN, keys, **how)
    assert_same(ours, _generate(PlainEngine(), model, UNEVEN, keys, **how))
    assert len(graphs) == 1


def test_in_chunks_and_with_one_row(graphs):
    model, keys = build_model("qwen3").to(DEVICE), make_keys(3, 1)
    whole = _generate(NativeEngine(), model, UNEVEN, keys)
    assert_same(_generate(NativeEngine(max_batch_rows=2), model, UNEVEN, keys), whole)
    one = _generate(NativeEngine(), model, UNEVEN[:1], [keys[0][:1]])
    drawn = one.lengths.item()
    assert torch.equal(one.completion_ids[0], whole.completion_ids[0, :drawn])


def test_rows_that_have_ended_leave_when_half_of_all_have(graphs):
    limits = [[1, 2, 3, 20, 21, 36]]
    ours = _generate(
        NativeEngine(),
        build_model("qwen2").to(DEVICE),
        [[5, 9]],
        make_keys(1, 6),
        limits=limits,
        eos=(),
        length=40,
    )
    assert ours.lengths.tolist() == limits[0] and ours.completion_ids.shape[1] == 36
    assert len(graphs[0]._tokens) == 1  # 6 rows, 3 after 16 tokens, 1 after 32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter computes no bfloat16 products")
def test_adapters_in_few_bits_are_drawn_with(graphs):
    model, keys = build_model("qwen2").to(DEVICE), make_keys(3, 4)
    add_adapters(model, Lora(rank=4), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    with torch.autocast(DEVICE, torch.bfloat16):
        rollout = _generate(NativeEngine(), model, UNEVEN, keys, eos=())
    with adapters_off(model):
        bare = scored(model, rollout, 1.0)
    assert len(graphs) == 1
    assert (scored(model, rollout, 1.0) - rollout.sampling_logprobs).abs().mean() < 0.03
    assert (bare - rollout.sampling_logprobs).abs().mean() > 0.3
