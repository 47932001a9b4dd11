"""The decoder and the draw of GPUs, on one where there is one, else interpreted on the CPU: the samples of torch."""

import pytest
import torch

pytest.importorskip("triton")
from grpo_pl.functional import race_kernel, sampling
from grpo_pl.functional.sampling import Noise, draw_tokens, row_key, score_gaps, token_keys
from grpo_pl.rollout.native import engine as native_engine
from grpo_pl.rollout.native import gpu_kernels
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
        {"top_logprobs": 3},
        {"limits": [[17], [1], [16]], "eos": ()},
    ],
)
def test_what_else_a_request_asks_for(build_model, make_keys, prompts, graphs, how):
    model, keys = build_model("qwen2").to(DEVICE), make_keys(3, 1)
    ours = _generate(NativeEngine(), model, prompts, keys, **how)
    _assert_same(ours, _generate(PlainEngine(), model, prompts, keys, **how))


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


@pytest.mark.parametrize("vocabulary", [5, 300, 10_001])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_race_is_that_of_torch(vocabulary, temperature, dtype):
    rows = 6
    logits = (3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[0, 1:] = -torch.inf  # one token is left
    noise = Noise(token_keys(torch.tensor([row_key("race", i) for i in range(rows)]), 3))
    tokens, logprobs = draw_tokens(logits, noise, temperature=temperature)
    assert noise.keys is not None
    ours = race_kernel.race(logits.to(DEVICE), noise.keys.to(DEVICE), temperature=temperature)
    assert ours[0].tolist() == tokens.tolist()
    torch.testing.assert_close(ours[1].cpu(), logprobs, atol=1e-5, rtol=0.0)
    if temperature:
        assert score_gaps(logits, noise, temperature=temperature)[1:].min() > 1e-4  # so equal tokens are no luck


def test_the_times_of_the_race_are_those_of_torch():
    """With equal logits the earliest wins: in 200 rows of 2,000 entries, and in 4 of 100,000, where it is early."""
    for rows, vocabulary in ((200, 2000), (4, 100_000)):
        keys = token_keys(torch.tensor([row_key("times", i) for i in range(rows)]), 0)
        tokens, _ = race_kernel.race(torch.zeros(rows, vocabulary, device=DEVICE), keys.to(DEVICE), temperature=1.0)
        assert tokens.tolist() == sampling.arrival_times(keys, vocabulary).argmin(dim=1).tolist()


def test_logits_that_are_not_finite_show():
    logits = torch.zeros(2, 50, device=DEVICE)
    logits[1, 7] = torch.nan
    _, logprobs = race_kernel.race(logits, torch.arange(2, device=DEVICE), temperature=1.0)
    assert logprobs.isfinite().tolist() == [True, False]


@pytest.mark.parametrize(("queries", "key_heads", "size"), [(4, 4, 8), (6, 2, 12), (14, 2, 64), (3, 1, 80)])
def test_attention_reads_the_columns_of_a_row(queries, key_heads, size):
    rows, columns, column = 3, 150, 140
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(rows, queries + 2 * key_heads, size, generator=generator)
    cache = torch.randn(2, rows + 2, key_heads, columns, size, generator=generator)  # room for two more rows
    starts = torch.tensor([0, 7, 139])
    visible = (torch.arange(columns) >= starts.unsqueeze(1)) & (torch.arange(columns) <= column)
    keys, values = cache[:, :rows].repeat_interleave(queries // key_heads, dim=2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        heads[:, :queries].unsqueeze(2), keys, values, attn_mask=visible[:, None, None], scale=0.3
    )
    arguments = (heads.flatten(1), cache, starts, torch.tensor(column))
    found = gpu_kernels.attend_to_columns(*(each.to(DEVICE) for each in arguments), scale=0.3)
    torch.testing.assert_close(found.cpu(), expected.reshape(rows, -1), atol=1e-5, rtol=1e-5)


def test_gated_is_silu_times_up():
    gate, up = torch.randn(2, 3, 1500, generator=torch.Generator().manual_seed(0))
    found = gpu_kernels.gated(torch.cat([gate, up], dim=1).to(DEVICE))
    torch.testing.assert_close(found.cpu(), torch.nn.functional.silu(gate) * up, atol=1e-6, rtol=1e-5)
