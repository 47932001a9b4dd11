"""Attention, norms and gates in C, for each instruction set: float64's values and gradients, whatever the threads."""

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from grpo_pl.extras.kernels import library
from grpo_pl.extras.kernels.library import PackedAttention, RMSNorm, SiluProduct, training_kernels
from grpo_pl.policy.packing import Spans

LIBRARY = os.environ.get("DECODE_LIBRARY")  # by the test with sanitizers
KERNELS = library.built_kernels(Path(LIBRARY) if LIBRARY else None)
pytestmark = pytest.mark.skipif(not KERNELS, reason="no C compiler has built the kernels")


@pytest.fixture(params=KERNELS, autouse=True)
def kernel(request, monkeypatch):
    monkeypatch.setattr(library, "training_kernels", lambda: KERNELS[request.param])


def spans_of(prompts: list[int], completions: list[list[int]]) -> Spans:
    """Prompts first, then their completions, as `packing.pack` lays them out; by lengths."""
    flat = [length for group in completions for length in group]
    ends = torch.tensor([*prompts, *flat]).cumsum(0)
    starts = ends - torch.tensor([*prompts, *flat])
    first = torch.tensor([0, *map(len, completions)]).cumsum(0)
    return Spans(
        starts[: len(prompts)].clone(), torch.tensor(prompts), first, starts[len(prompts) :].clone(), torch.tensor(flat)
    )


def rotary(positions: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of another length than one, as YaRN's."""
    angles = positions.double().unsqueeze(1) * 100.0 ** -torch.linspace(0, 1, size // 2, dtype=torch.float64)
    return 1.1 * torch.cat([angles, angles], dim=1).cos(), 1.1 * torch.cat([angles, angles], dim=1).sin()


def turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cosines.unsqueeze(1) + torch.cat([-right, left], dim=-1) * sines.unsqueeze(1)


def reference(query, key, value, cosines, sines, spans: Spans, scale: float) -> torch.Tensor:
    """One sequence after the other, by torch."""
    out = torch.zeros_like(query)
    query, key = turned(query, cosines, sines), turned(key, cosines, sines)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    for prompt, (start, length) in enumerate(zip(spans.prompt_starts, spans.prompt_lengths, strict=True)):
        shared = torch.arange(start, start + length)
        for own in [
            torch.arange(0),
            *(
                torch.arange(spans.starts[s], spans.starts[s] + spans.lengths[s])
                for s in range(int(spans.first_sequence[prompt]), int(spans.first_sequence[prompt + 1]))
            ),
        ]:
            tokens = torch.cat([shared, own])
            rows = [states[tokens].transpose(0, 1) for states in (query, key, value)]
            found = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scale).transpose(0, 1)
            new = own if len(own) else shared
            out = out.index_put((new,), found[len(tokens) - len(new) :])
    return out


def attention_case(spans: Spans, *, heads: int, key_heads: int, size: int, seed: int = 0):
    tokens = int(spans.prompt_lengths.sum() + spans.lengths.sum())
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, heads, size), (tokens, key_heads, size), (tokens, key_heads, size))
    states = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    grad = torch.randn(shapes[0], dtype=torch.float64, generator=generator)
    return states, rotary(torch.arange(tokens) % 50, size), grad


def run(function, tensors, grad, *further):
    """The result, and the gradients of ``tensors``."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves, *further)
    return out.detach(), torch.autograd.grad(out, leaves, grad)


def assert_as_in_float64(function, expected, tensors, grad, *, wide=(), further=()):
    out, gradients = run(expected, tensors, grad, *wide, *further)
    ours, found = run(function, [t.float() for t in tensors], grad.float(), *[t.float() for t in wide], *further)
    assert (ours - out).norm() <= 1e-6 * out.norm()
    for mine, theirs in zip(found, gradients, strict=True):
        assert (mine - theirs).norm() <= 2e-6 * (theirs.norm() + grad.norm())  # of one key it is 0


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=7),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (6, 2), (50, 1)]),
    size=st.sampled_from([2, 8, 16, 24, 32, 40, 64, 96]),
)
def test_attention_and_its_gradient_are_those_of_float64(prompts, lengths, heads, size):
    """Ragged prompts and completions, grouped heads, and sizes of heads that fill no vector."""
    shares = torch.arange(len(lengths)) * len(prompts) // len(lengths)
    spans = spans_of(
        prompts, [[n for n, at in zip(lengths, shares, strict=True) if at == p] for p in range(len(prompts))]
    )
    states, turns, grad = attention_case(spans, heads=heads[0], key_heads=heads[1], size=size)
    further = (spans, 1 / math.sqrt(size))
    assert_as_in_float64(PackedAttention.apply, reference, states, grad, wide=turns, further=further)


def test_sequences_longer_than_what_gradients_pass_together():
    """Gradients take 256 tokens of a sequence at a time."""
    spans = spans_of([256, 200], [[257], [0, 320, 56]])
    states, turns, grad = attention_case(spans, heads=3, key_heads=1, size=24)
    assert_as_in_float64(PackedAttention.apply, reference, states, grad, wide=turns, further=(spans, 0.2))


def test_scores_of_any_size_give_finite_attention():
    """Weights are relative to the largest score: e^1000 does not occur."""
    spans = spans_of([5], [[20, 3]])
    (query, key, value), turns, grad = attention_case(spans, heads=2, key_heads=1, size=16)
    states = [100 * query, 100 * key, value]
    out, gradients = run(
        PackedAttention.apply, [t.float() for t in states], grad.float(), *[t.float() for t in turns], spans, 1.0
    )
    expected, _ = run(reference, states, grad, *turns, spans, 1.0)
    assert torch.isfinite(torch.cat([each.flatten() for each in gradients])).all()
    assert (out - expected).norm() <= 1e-2 * expected.norm()  # a score of 1e5 is rounded to 1e-2


@pytest.mark.skipif(torch.get_num_threads() > 1 and library._openmp() is None, reason="torch's OpenMP is another one")
def test_the_number_of_threads_changes_no_bit():
    spans = spans_of([9, 30, 4], [[20, 0, 50], [7], [64, 3]])
    states, turns, grad = attention_case(spans, heads=4, key_heads=2, size=16)
    rows = torch.randn(1000, 48, generator=torch.Generator().manual_seed(1))
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        try:
            narrow = [t.float() for t in states], grad.float(), *[t.float() for t in turns], spans, 0.25
            attention, gate = run(PackedAttention.apply, *narrow), run(SiluProduct.apply, [rows, -rows], rows)
            norm = run(lambda x, weight: RMSNorm.apply(x, weight, 1e-6), [rows, rows[0]], rows)
        finally:
            torch.set_num_threads(before)
        found.append([each for out, gradients in (attention, gate, norm) for each in (out, *gradients)])
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("width", [16, 48, 576])
def test_norms_and_their_gradients_are_those_of_float64(rows, width):
    generator = torch.Generator().manual_seed(rows)
    x, grad = torch.randn(2, rows, width, dtype=torch.float64, generator=generator)
    weight = torch.rand(width, dtype=torch.float64, generator=generator)
    assert_as_in_float64(
        lambda x, weight: RMSNorm.apply(x, weight, 1e-3),
        lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-3),
        [x, weight],
        grad,
    )


def test_gates_and_their_gradients_are_those_of_float64():
    generator = torch.Generator().manual_seed(0)
    gate, up, grad = torch.randn(3, 70, 16 * 17, dtype=torch.float64, generator=generator)
    gate[0], gate[1] = 4 * gate[0], torch.linspace(-200, 200, gate.shape[1])
    assert_as_in_float64(SiluProduct.apply, lambda gate, up: F.silu(gate) * up, [gate, up], grad)


def test_nothing_that_is_not_a_number_is_hidden():
    rows = torch.full((1, 16), torch.nan)
    spans = spans_of([1], [[1]])
    states = [torch.full((2, 1, 16), torch.nan)] * 3
    turns = [torch.ones(2, 16)] * 2
    assert RMSNorm.apply(rows, torch.ones(16), 1e-6).isnan().all()
    assert SiluProduct.apply(rows, rows).isnan().all()
    assert PackedAttention.apply(*states, *turns, spans, 1.0).isnan().all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"starts": torch.tensor([4, 6])},  # it overlaps with the one behind it
        {"lengths": torch.tensor([3, 5])},  # more tokens than there are
        {"prompt_starts": torch.tensor([-1])},
        {"first_sequence": torch.tensor([0, 3])},
        {"lengths": torch.tensor([3, 3], dtype=torch.int32)},
    ],
)
def test_tokens_that_are_not_there_are_never_read(wrong):
    spans = spans_of([3], [[3, 4]])._replace(**wrong)
    states, turns = [torch.zeros(10, 1, 16)] * 3, [torch.zeros(10, 16)] * 2
    with pytest.raises(AssertionError):
        PackedAttention.apply(*states, *turns, spans, 1.0)


def test_the_environment_names_the_kernels_of_updates(monkeypatch, request):
    monkeypatch.undo()
    built = library.built_kernels()
    for name in built:
        monkeypatch.setenv(library.SWITCH, name)
        assert training_kernels() is built[name]
    monkeypatch.setenv(library.SWITCH, "torch")
    assert training_kernels() is None
    monkeypatch.delenv(library.SWITCH)
    assert training_kernels() is (None if next(iter(built)) == "sse2" else next(iter(built.values()), None))
    monkeypatch.setattr(library, "_openmp", lambda: None)  # torch brings another OpenMP
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert training_kernels() is None
