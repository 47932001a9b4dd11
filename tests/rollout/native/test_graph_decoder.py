"""The decoder and the draw of GPUs, on one where there is one, else interpreted on the CPU: the samples of torch."""

import pytest
import torch

pytest.importorskip("triton")
from grpo_pl.functional import sampling
from grpo_pl.rollout.native import engine as native_engine
from grpo_pl.rollout.native.decoder_choice import SWITCH
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.native.graph_decoder import GraphDecoder
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import GenerateRequest, Rollout, SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[GraphDecoder]:
    """The native engine decodes and draws as on a GPU; the decoders that it makes."""
    made: list[GraphDecoder] = []

    class Watched(GraphDecoder):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setenv(SWITCH, "torch")
    monkeypatch.setattr(native_engine, "GraphDecoder", Watched)
    monkeypatch.setattr(native_engine, "decodes_in_graphs", lambda model: True)
    monkeypatch.setattr(sampling, "has_triton", lambda device: True)
    return made


def _generate(engine, model, prompts, keys, *, eos=(6, 20), longest=20, limits=None, **options) -> Rollout:
    sampling_params = SamplingParams(max_completion_length=longest, **options)
    request = GenerateRequest(
        prompt_ids=prompts, keys=keys, sampling=sampling_params, eos_token_ids=eos, pad_token_id=0, limits=limits
    )
    return engine.generate(model, request)


def _assert_same(ours: Rollout, reference: Rollout) -> None:
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "support", "top_ids"):
        mine, theirs = getattr(ours, name), getattr(reference, name)
        assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs)), name
    assert ours.finish_reasons == reference.finish_reasons
    torch.testing.assert_close(ours.sampling_logprobs, reference.sampling_logprobs, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {"eos": ()}),
        ("mistral", {"temperature": 0.6}),
        ("qwen2", {"temperature": 0.0}),
        ("qwen2", {"eos": (6,)}),
        ("qwen3", {}),
    ],
)
def test_draws_the_samples_of_the_plain_engine(build_model, make_keys, prompts, graphs, family, how):
    """Of prompts of three lengths, with completions that end before and behind a look after 16 tokens."""
    model, keys = build_model(family).to(DEVICE), make_keys(3, 1)
    ours = _generate(NativeEngine(), model, prompts, keys, **how)
    _assert_same(ours, _generate(PlainEngine(), model, prompts, keys, **how))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "how",
    [
        {"top_k": 5},
        {"top_p": 0.8, "temperature": 1.3},
        {"top_k": 5, "sampling_mask": True},
        {"top_p": 0.5, "sampling_mask": True},
        {"top_logprobs": 3},
        {"limits": [[17], [1], [16]], "eos": ()},
    ],
)
def test_what_else_a_request_asks_for(build_model, make_keys, prompts, graphs, how):
    model, keys = build_model("qwen2").to(DEVICE), make_keys(3, 1)
    ours = _generate(NativeEngine(), model, prompts, keys, **how)
    _assert_same(ours, _generate(PlainEngine(), model, prompts, keys, **how))
    assert len(graphs) == 1


def test_in_chunks_and_with_one_row(build_model, make_keys, prompts, graphs):
    model, keys = build_model("qwen3").to(DEVICE), make_keys(3, 1)
    whole = _generate(NativeEngine(), model, prompts, keys)
    _assert_same(_generate(NativeEngine(max_batch_rows=2), model, prompts, keys), whole)
    one = _generate(NativeEngine(), model, prompts[:1], [keys[0][:1]])
    drawn = one.lengths.item()
    assert torch.equal(one.completion_ids[0], whole.completion_ids[0, :drawn])


def test_rows_that_have_ended_leave_when_half_of_all_have(build_model, make_keys, graphs):
    limits = [[1, 2, 3, 20, 21, 36]]
    ours = _generate(
        NativeEngine(), build_model("qwen2").to(DEVICE), [[5, 9]], make_keys(1, 6), limits=limits, eos=(), longest=40
    )
    assert ours.lengths.tolist() == limits[0] and ours.completion_ids.shape[1] == 36
    assert len(graphs[0]._tokens) == 1  # 6 rows, 3 after 16 tokens, 1 after 32
