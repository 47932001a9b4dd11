"""The kernels by a driver in C without Python: on this processor, and on ARM's under an emulator; by GCC and by Clang.

Debian: ``apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user``, and ``clang`` for the other compiler.
"""

import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_pl.functional.sampling import arrival_times, token_keys
from grpo_pl.rollout.decoding import row_keys
from tests.extras.kernels.test_library import attention_case, reference, spans_of
from tests.kernels import named_keys, small_model
from tests.race import logits_along

ROOT = Path(__file__).parents[3]
SOURCES = [*(ROOT / "grpo_pl/csrc" / name for name in ("library.c", "avx512.c", "avx2.c", "baseline.c"))]
SOURCES.append(Path(__file__).with_name("kernel_driver.c"))
AS_INSTALLED = ["-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-pthread"]  # setup.py
CHECKED = ["-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all"]  # more optimisation takes the compilers minutes
ARM = "aarch64-linux-gnu"
EMULATED = ["qemu-aarch64", "-L", f"/usr/{ARM}"]
BUILDS = {
    "here, checked": ["gcc", *CHECKED],
    "ARM, checked": [f"{ARM}-gcc", *CHECKED],
    "ARM": [f"{ARM}-gcc"],
    "here by clang": ["clang"],
    "ARM by clang": ["clang", f"--target={ARM}"],
}
FURTHER = ("ARM, checked", "ARM by clang")
"""What the others hold already: the check of both sources here, both compilers on one processor each."""
CLOSE = 5e-6  # so that no two processors are further apart than 1e-5


class Case:
    """What an entry is called with, as the driver reads it, and what it has to give, by torch in double precision."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given = bytearray()
        self.expected: list[tuple[str, Tensor]] = []

    def numbers(self, *numbers: int) -> None:
        self.given += torch.tensor(numbers, dtype=torch.int32).numpy().tobytes()

    def give(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            narrow = tensor if tensor.dtype in (torch.int32, torch.int64) else tensor.float()
            self.given += narrow.detach().contiguous().numpy().tobytes()

    def matrix(self, weight: Tensor, bias: Tensor | None) -> None:
        self.numbers(*weight.shape, bias is not None)
        self.give(weight, *([] if bias is None else [bias]))

    def expect(self, **tensors: Tensor) -> None:
        self.expected += [(f"{self.name}: {name}", tensor.detach()) for name, tensor in tensors.items()]


def drawn(*shape: int, seed: int) -> Tensor:
    """Numbers of float32, as doubles."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def products() -> Case:
    case = Case("multiply")
    sizes = [(1, 1, 1, 0), (5, 33, 70, 33), (13, 64, 31, 16), (50, 96, 129, 1)]  # rows, inputs, outputs, packed before
    case.numbers(len(sizes))
    for rows, inputs, outputs, first in sizes:
        weight, bias, x = drawn(outputs, inputs, seed=1), drawn(outputs, seed=2), drawn(rows, inputs, seed=3)
        case.numbers(rows, first)
        case.matrix(weight, bias)
        case.give(x)
        case.expect(**{f"{outputs} outputs": x @ weight.T + bias})
    return case


def attentions() -> Case:
    case = Case("attend")
    sizes = [(4, 2, 24, 2), (6, 1, 2, 1), (3, 3, 40, 2), (8, 2, 64, 2)]  # heads, key heads, size, threads
    case.numbers(len(sizes))
    for heads, key_heads, size, threads in sizes:
        spans = spans_of([9, 230, 30], [[20, 0, 50], [45], [7]])
        states, turns, grad = attention_case(spans, heads=heads, key_heads=key_heads, size=size)
        states, turns, grad = [x.float().double() for x in states], [x.float().double() for x in turns], grad.float()
        scale = torch.tensor(1 / math.sqrt(size))
        case.numbers(len(spans.prompt_starts), len(spans.starts), len(grad), heads, key_heads, size, threads)
        case.give(scale, *spans, *states, *turns, grad)
        leaves = [x.requires_grad_() for x in states]
        out = reference(*leaves, *turns, spans, scale.item())
        gradients = dict(zip(("query", "key", "value"), torch.autograd.grad(out, leaves, grad.double()), strict=True))
        case.expect(out=out, logsumexp=_log_sums(*states[:2], *turns, spans, scale), **gradients)
    return case


def _log_sums(query, key, cosines, sines, spans, scale) -> Tensor:
    """(tokens, heads), by one product of all: which tokens see which is a mask."""
    tokens, heads, size = query.shape
    turn = torch.stack([cosines, sines], -1)[:, : size // 2]  # (tokens, half, 2)
    query, key = (
        torch.view_as_real(
            torch.view_as_complex(torch.stack(x.detach().chunk(2, -1), -1)) * torch.view_as_complex(turn)[:, None]
        )
        for x in (query, key)
    )
    scores = torch.einsum("qhdc,khdc->qkh", query, key.repeat_interleave(heads // key.shape[1], 1)) * scale
    sees = torch.zeros(tokens, tokens, dtype=torch.bool)
    for prompt, (start, length) in enumerate(zip(spans.prompt_starts, spans.prompt_lengths, strict=True)):
        shared = slice(start, start + length)
        sees[shared, shared] = True
        for s in range(int(spans.first_sequence[prompt]), int(spans.first_sequence[prompt + 1])):
            own = slice(spans.starts[s], spans.starts[s] + spans.lengths[s])
            sees[own, shared] = sees[own, own] = True
    return scores.masked_fill(~sees.tril()[:, :, None], -math.inf).logsumexp(1)


def norms() -> Case:
    case, rows, width = Case("normalize"), 130, 48
    x, grad, weight = drawn(rows, width, seed=1), drawn(rows, width, seed=2), drawn(width, seed=3)
    case.numbers(rows, width)
    case.give(torch.tensor(1e-3), x, weight, grad)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    out = F.rms_norm(x, (width,), weight, torch.tensor(1e-3).item())
    to_x, to_weight = torch.autograd.grad(out, leaves, grad)
    case.expect(out=out, x=to_x, weight=to_weight)
    return case


def gates() -> Case:
    case = Case("gate")
    gate, up, grad = drawn(70, 272, seed=1), drawn(70, 272, seed=2), drawn(70, 272, seed=3)
    gate[0] = torch.linspace(-200, 200, 272).double()
    case.numbers(gate.numel())
    case.give(gate, up, grad)
    out = F.silu(gate.requires_grad_()) * up.requires_grad_()
    to_gate, to_up = torch.autograd.grad(out, [gate, up], grad)
    case.expect(out=out, gate=to_gate, up=to_up)
    return case


def draws() -> Case:
    """Completions of two policies: of a Llama with biases, and of a Qwen3 with norms of heads; drawn and greedy."""
    case = Case("draw")
    case.numbers(2)
    for kind, temperature, head_size in (("Llama", 0.7, 6), ("Qwen3", 0.0, 24)):
        model = small_model(qwen3=kind == "Qwen3", vocabulary=1100, head_size=head_size, intermediate=80)
        prompts, length = [[5, 9, 1, 7, 3, 3, 8] * 13, [2], [11, 4, 30]], 20
        keys = torch.tensor(row_keys(named_keys(len(prompts), 5)))
        _give_policy(case, model, positions=128)
        _give_request(case, prompts, keys, length, temperature)
        wide, owners = model.double(), [p for p in range(len(prompts)) for _ in range(5)]
        rows = [
            _completion(wide, prompts[p], key, length - i % 3, temperature)
            for i, (p, key) in enumerate(zip(owners, keys, strict=True))
        ]
        _expect_rows(case, f"rollout of {kind}", rows, length)
        for prompt in prompts:
            case.expect(**{f"{kind} reads {len(prompt)} tokens": logits_along(wide, prompt[:1], [*prompt[1:], 0])})
        halves = [(tokens[: length // 2], logprobs[: length // 2]) for tokens, logprobs in rows]
        _expect_rows(case, f"a part of {kind}", halves, length // 2)
        for p, (tokens, _) in zip(owners, halves, strict=True):
            case.expect(**{f"{kind} goes on": logits_along(wide, prompts[p], [*tokens, 0])[-1]})
    return case


def _give_policy(case: Case, model, *, positions: int) -> None:
    config, trunk = model.config, model.model
    attention = trunk.layers[0].self_attn
    norms = hasattr(attention, "q_norm")
    case.numbers(len(trunk.layers), config.hidden_size, config.intermediate_size, config.vocab_size)
    case.numbers(config.num_attention_heads, config.num_key_value_heads, attention.head_dim, norms, positions)
    turns = trunk.rotary_emb(torch.empty(1), torch.arange(positions).unsqueeze(0))
    case.give(torch.tensor([config.rms_norm_eps, config.rms_norm_eps, attention.scaling]))
    case.give(trunk.embed_tokens.weight, trunk.norm.weight)
    case.give(*(turn[0, :, : attention.head_dim // 2] for turn in turns))
    for layer in trunk.layers:
        attention, mlp = layer.self_attn, layer.mlp
        case.give(layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
        if norms:
            case.give(attention.q_norm.weight, attention.k_norm.weight)
        for modules in (
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        ):
            biased = modules[0].bias is not None
            bias = torch.cat([module.bias for module in modules]) if biased else None
            case.matrix(torch.cat([module.weight for module in modules]), bias)
    case.matrix(model.lm_head.weight, model.lm_head.bias)


def _give_request(case: Case, prompts: Sequence[Sequence[int]], keys: Tensor, length: int, temperature: float) -> None:
    rows, stops = len(keys), [6, 20]
    starts = torch.tensor([0, *map(len, prompts)]).cumsum(0)
    case.numbers(len(prompts), rows, length, len(stops), 2)
    case.give(torch.tensor(temperature), starts)
    case.numbers(*(token for prompt in prompts for token in prompt))
    case.numbers(*(row * len(prompts) // rows for row in range(rows)))
    case.give(keys)
    case.numbers(*(length - i % 3 for i in range(rows)))
    case.numbers(*stops)


def _completion(
    model, prompt: Sequence[int], key: Tensor, limit: int, temperature: float
) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, each from the whole sequence before it."""
    tokens, logprobs = list[int](), list[float]()
    while len(tokens) < limit and not {6, 20} & set(tokens):
        logits = logits_along(model, prompt, [*tokens, 0])[-1]
        chances = (logits / temperature if temperature else logits).log_softmax(0)
        times = arrival_times(token_keys(key, len(tokens)), len(logits)).double()
        tokens.append(int((chances - times.log() if temperature else chances).argmax()))
        logprobs.append(float(chances[tokens[-1]]))
    return tokens, logprobs


def _expect_rows(case: Case, name: str, rows: Sequence[tuple[list[int], list[float]]], length: int) -> None:
    tokens, logprobs = torch.zeros(len(rows), length, dtype=torch.int64), torch.zeros(len(rows), length).double()
    for row, (ids, chances) in enumerate(rows):
        tokens[row, : len(ids)], logprobs[row, : len(ids)] = torch.tensor(ids), torch.tensor(chances).double()
    lengths = torch.tensor([len(ids) for ids, _ in rows], dtype=torch.int32)
    case.expect(**{f"{name}, tokens": tokens, f"{name}, log-probabilities": logprobs, f"{name}, lengths": lengths})


@cache
def cases() -> list[Case]:
    return [products(), attentions(), norms(), gates(), draws()]


def found(output: bytes) -> Iterator[tuple[str, list[Tensor]]]:
    """The results of each kernel, shaped as those that are expected."""
    while output:
        name, output = output[:16].rstrip(b"\0").decode(), output[16:]
        results = []
        for _, expected in (each for case in cases() for each in case.expected):
            dtype = torch.float32 if expected.dtype == torch.float64 else expected.dtype
            size = expected.numel() * dtype.itemsize
            results.append(torch.frombuffer(bytearray(output[:size]), dtype=dtype).reshape(expected.shape))
            output = output[size:]
        yield name, results


def runs(build: str) -> list[str]:
    """The command before the driver's name; the test is skipped, by name, where something is missing."""
    compiler, *_ = BUILDS[build]
    emulated = build.startswith("ARM")
    if emulated and platform.machine() == "aarch64":
        pytest.skip("this processor is one: `here` is its kernel")
    for needed in (compiler, *(["qemu-aarch64", f"{ARM}-gcc"] if emulated else [])):
        # where all that can be had must be there, nothing skips for want of it
        if not shutil.which(needed) and not (os.environ.get("CI") and needed != "clang"):
            pytest.skip(f"{needed} is missing: see the top of this file")
    return EMULATED if emulated else []


@pytest.mark.parametrize("build", [pytest.param(name, marks=[pytest.mark.slow] * (name in FURTHER)) for name in BUILDS])
def test_every_entry_gives_what_double_precision_gives_and_nothing_is_undefined(build, tmp_path):
    before, (compiler, *flags) = runs(build), BUILDS[build]
    driver = tmp_path / "driver"
    built = [
        compiler,
        *AS_INSTALLED,
        *flags,
        f"-I{ROOT / 'grpo_pl/csrc'}",
        *map(str, SOURCES),
        "-lm",
        "-o",
        str(driver),
    ]
    subprocess.run(built, check=True)
    given = b"".join(bytes(case.given) for case in cases())
    done = subprocess.run([*before, str(driver)], input=given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    results = dict(found(done.stdout))
    assert set(results) >= ({"neon"} if before or platform.machine() == "aarch64" else {"sse2"})
    named = [each for case in cases() for each in case.expected]
    for kernel, tensors in results.items():
        for (name, expected), result in zip(named, tensors, strict=True):
            if result.dtype == torch.float32:
                error = float((result - expected).norm() / expected.norm())
                assert error <= CLOSE, f"{kernel}, {name}: off by {error:.1e} of its norm"
            else:
                assert torch.equal(result, expected), f"{kernel}, {name}"
