"""Tests of the decode kernels that this processor supports: the plain engine's samples, and the same bits anyhow."""

import os
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_pl.extras.kernels.decode_kernel import DecodeKernel, PackedPolicy, built_kernels, draw_rollout
from grpo_pl.functional.sampling import Noise, score_gaps, token_keys
from grpo_pl.rollout.decoding import row_keys
from grpo_pl.rollout.engine import RolloutInterrupted
from grpo_pl.rollout.native.decoder_choice import SWITCH, WIDEST, choose_decoder, default_decoder, resumed_decoder
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import SamplingParams
from tests.kernels import KERNELS, LIBRARY, each_kernel, named_keys, small_model
from tests.race import logits_along
from tests.rollout.drawn import generate

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(not KERNELS, reason="no C compiler has built the decode kernel")


def _draw(kernel: DecodeKernel, model, prompts, keys, *, longest, temperature=1.0, stops=(), ask=lambda *_: None):
    rows = sum(map(len, keys))
    with torch.no_grad():
        policy = PackedPolicy(kernel, model, columns=max(map(len, prompts)) + longest)
        return draw_rollout(
            kernel,
            policy,
            prompts,
            owners=torch.arange(len(prompts)).repeat_interleave(len(keys[0])),
            keys=torch.tensor(row_keys(keys)),
            limits=torch.full((rows,), longest),
            temperature=temperature,
            stop_tokens=stops,
            ask=ask,
        )


def _reference(model, prompts, keys, *, longest, temperature=1.0, stops=(), engine=None):
    engine = engine or PlainEngine()
    return generate(engine, model, prompts, keys, length=longest, temperature=temperature, eos=stops)


def _assert_same_up_to_near_ties(model, prompts, keys, ours, reference, *, temperature=1.0) -> int:
    """How many rows differ, each where the race was decided by less than 1e-4; logarithms of equal rows agree."""
    tokens, logprobs, lengths = ours
    flat, differing = [key for group in keys for key in group], 0
    for row, key in enumerate(flat):
        expected = reference.completion_ids[row, : int(reference.lengths[row])].tolist()
        found, prompt = tokens[row, : int(lengths[row])].tolist(), prompts[row // len(keys[0])]
        if found == expected:
            close = (logprobs[row, : len(found)] - reference.sampling_logprobs[row, : len(found)]).abs().max()
            assert close <= 1e-4, f"row {row}: log-probabilities {close:.1e} apart"
            assert not tokens[row, len(found) :].any() and not logprobs[row, len(found) :].any()
            continue
        at = next(i for i, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other)
        logits = logits_along(model, prompt, expected[: at + 1])[-1:]
        name = torch.tensor(row_keys([[key]]))
        gap = score_gaps(logits, Noise(token_keys(name, at)), temperature=temperature or 1.0)
        assert temperature and gap <= 1e-4, f"row {row} differs at {at}, where the race was decided by {float(gap):.1e}"
        differing += 1
    return differing


@each_kernel
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1, 1), (5, 33, 70), (13, 64, 31), (300, 96, 129)])
def test_products_are_those_of_double_precision(kernel, rows, inputs, outputs):
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    exact = x.double() @ weight.double().T + bias
    torch.testing.assert_close(kernel.product(weight, x, bias)().double(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(kernel.product(weight, x)().double(), exact - bias, rtol=1e-5, atol=1e-4)


def test_a_product_keeps_what_it_multiplies():
    made = [torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)]
    kept = [weakref.ref(each) for each in made]
    product = next(iter(KERNELS.values())).product(made[1], made[0], made[2])
    expected = made[0] @ made[1].T + made[2]
    del made
    assert kept[0]() is not None  # weights and bias have been packed
    torch.testing.assert_close(product(), expected, rtol=1e-5, atol=1e-5)


@each_kernel
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6, 0.0])
@pytest.mark.parametrize("qwen3", [False, True], ids=["llama", "qwen3"])
def test_draws_the_samples_of_the_plain_engine(kernel, qwen3, temperature):
    model, keys = small_model(qwen3=qwen3), named_keys(3, 6)
    prompts, how = [[5, 9, 1, 7, 3, 3, 8], [2], [11, 4, 30]], {"longest": 20, "temperature": temperature}
    ours = _draw(kernel, model, prompts, keys, stops=[6, 20], **how)
    reference = _reference(model, prompts, keys, stops=[6, 20], **how)
    differing = _assert_same_up_to_near_ties(model, prompts, keys, ours, reference, temperature=temperature)
    assert differing == 0


@each_kernel
def test_a_large_vocabulary_is_raced_in_slices(kernel):
    """2,500 tokens are two slices and a part of one, which ends within a panel."""
    model, keys, prompts = small_model(vocabulary=2500), named_keys(8, 8), [[p, 2499 - p] for p in range(8)]
    ours = _draw(kernel, model, prompts, keys, longest=32)
    reference = _reference(model, prompts, keys, longest=32)
    assert _assert_same_up_to_near_ties(model, prompts, keys, ours, reference) <= 1
    assert (ours[0] >= 2048).any() and (ours[0] < 1024).any()


@each_kernel
def test_no_bit_depends_on_threads_or_on_other_rows(kernel):
    model, keys = small_model(), named_keys(9, 7)
    prompts = [[(3 * p + i) % 64 for i in range(1 + 11 * p)] for p in range(9)]
    before, drawn = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            drawn.append(_draw(kernel, model, prompts, keys, longest=40, stops=[6, 20]))
    finally:
        torch.set_num_threads(before)
    for other in drawn[1:]:
        assert all(torch.equal(one, two) for one, two in zip(drawn[0], other, strict=True))
    for p in (0, 4, 8):
        alone = _draw(kernel, model, [prompts[p]], [keys[p][2:3]], longest=40, stops=[6, 20])
        assert all(torch.equal(one[7 * p + 2], two[0]) for one, two in zip(drawn[0], alone, strict=True))


@each_kernel
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    prompts=st.lists(st.integers(1, 150), min_size=1, max_size=7),
    group=st.integers(1, 43),
    longest=st.integers(1, 24),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 4), (6, 2)]),
    head_size=st.sampled_from([16, 18, 64, 96, 128]),
    vocabulary=st.sampled_from([3, 61, 257, 1025]),
    intermediate=st.integers(1, 70),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_shape(kernel, prompts, group, longest, heads, head_size, vocabulary, intermediate, temperature):
    """1 to 301 rows, ragged prompts, groups and vocabularies that no tile divides, one token, the whole context."""
    shape = {"heads": heads[0], "key_heads": heads[1], "head_size": head_size, "vocabulary": vocabulary}
    model = small_model(**shape, intermediate=intermediate, layers=1)
    asked = [[(7 * p + 5 * i) % vocabulary for i in range(length)] for p, length in enumerate(prompts)]
    keys, how = named_keys(len(prompts), group), {"longest": longest, "temperature": temperature, "stops": [1]}
    ours = _draw(kernel, model, asked, keys, **how)
    engine = NativeEngine()
    engine.decoder = "torch"
    reference = _reference(model, asked, keys, engine=engine, **how)
    if temperature:  # greedy rows of a group are equal, and a near-tie of their logits is in all of them
        assert _assert_same_up_to_near_ties(model, asked, keys, ours, reference, temperature=temperature) <= 1
    else:
        assert (ours[2] == reference.lengths).float().mean() > 0.8


@each_kernel
def test_rows_end_at_their_own_limit(kernel):
    model, limits = small_model(), torch.tensor([1, 40, 3])
    with torch.no_grad():
        policy = PackedPolicy(kernel, model, columns=42)
        asked = {"owners": torch.tensor([0, 0, 1]), "keys": torch.tensor([5, 6, 7]), "temperature": 1.0}
        drawn = draw_rollout(kernel, policy, [[1], [2, 3]], **asked, limits=limits, stop_tokens=[], ask=lambda *_: None)
    assert torch.equal(drawn[2], limits.int())
    assert not drawn[1][0, 1:].any() and drawn[1][1].all()


@each_kernel
def test_a_rollout_is_stopped_from_within(kernel):
    """The first call is made before; later ones come from C, every 20 ms, the first of them perhaps while it reads."""
    model, asked = small_model(layers=4), []

    def ask(tokens: int, finished: int) -> None:
        asked.append((tokens, finished))
        if tokens:
            raise RolloutInterrupted

    with pytest.raises(RolloutInterrupted):
        _draw(kernel, model, [[1, 2]] * 64, named_keys(64, 16), longest=450, ask=ask)
    assert asked == sorted(asked) and asked[0] == (0, 0) and 0 < asked[-1][0] < 64 * 16 * 450


@each_kernel
def test_tokens_that_the_policy_does_not_know_are_refused(kernel):
    with pytest.raises(ValueError, match=r"a prompt has the token 64, and the policy's vocabulary 64 tokens"):
        _draw(kernel, small_model(), [[1, 64]], named_keys(1, 2), longest=4)


def test_the_rule_goes_by_width_and_the_switch_overrules_it(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    fastest = next(iter(built_kernels()))
    monkeypatch.setitem(WIDEST, fastest, 32)
    assert default_decoder(small_model(heads=4)) == fastest  # 32 wide
    monkeypatch.setitem(WIDEST, fastest, 31)
    assert default_decoder(small_model(heads=4)) == "torch"  # and not the next fastest
    monkeypatch.setenv(SWITCH, "torch")
    assert default_decoder(small_model(heads=1, key_heads=1)) == "torch"
    monkeypatch.setenv(SWITCH, "mmx")
    with pytest.raises(ValueError, match="GRPO_PL_NATIVE is 'mmx': here it can be torch, "):
        default_decoder(small_model())


def test_a_run_that_goes_on_keeps_what_drew_before_or_says_that_it_cannot(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    model, fastest = small_model(), next(iter(built_kernels()))
    monkeypatch.setitem(WIDEST, fastest, 4096)
    assert resumed_decoder("torch", model) == ("torch", None)
    assert resumed_decoder(fastest, model) == (fastest, None)
    other, line = resumed_decoder("mmx", model)
    assert other == fastest and line == (
        f"the run drew with mmx, and goes on with {fastest}, since this machine does not have it: samples are equal up "
        "to near-ties."
    )
    monkeypatch.setenv(SWITCH, "torch")
    assert resumed_decoder("torch", model) == ("torch", None)
    other, line = resumed_decoder(fastest, model)
    assert other == "torch" and f"the run drew with {fastest}, and goes on with torch, since {SWITCH} says so" in line


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [({"top_k": 3}, "top_k"), ({"top_p": 0.5}, "top_p"), ({"top_logprobs": 2}, "likeliest")],
)
def test_what_the_kernel_cannot_do_goes_to_torch_with_one_line(monkeypatch, sampling, reason):
    monkeypatch.setenv(SWITCH, next(iter(built_kernels())))
    engine = NativeEngine()
    generate(engine, small_model(), [[1, 2]], named_keys(1, 2), length=4, **sampling)
    assert "own forward pass" in engine.describe() and reason in engine.describe()


@each_kernel
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_logits_that_are_not_finite_show_in_the_log_probability(kernel, temperature):
    """One number in the middle of a slice of the vocabulary; the engine ends the run where it sees one."""
    model = small_model(vocabulary=200)
    with torch.no_grad():
        model.lm_head.weight[77] = torch.nan
    _, logprobs, _ = _draw(kernel, model, [[1, 2, 3]], named_keys(1, 4), longest=3, temperature=temperature)
    assert logprobs.isnan().all()


def test_weights_of_several_types_go_to_torch(monkeypatch):
    monkeypatch.setenv(SWITCH, next(iter(built_kernels())))
    model = small_model()
    model.model.layers[0].mlp.double()
    name, reason = choose_decoder(model, SamplingParams(max_completion_length=1), stop_strings=False)
    assert name == "torch" and reason == "computes in float32 on CPUs, and the policy in float32 and float64 on cpu"


def test_a_library_that_does_not_load_leaves_the_work_to_torch(tmp_path, caplog):
    (tmp_path / "_kernels.so").write_bytes(b"of another machine")
    assert built_kernels(tmp_path / "_kernels.so") == {}
    assert "_kernels.so does not load, and torch computes" in caplog.text


# --- other builds -----------------------------------------------------------------------------------------------------

BESIDE = [str(Path(__file__).with_name("test_kernel_slots.py")), str(ROOT / "tests/extras/kernels/test_library.py")]
CSRC = ROOT / "grpo_pl/csrc"
COMPILER = os.environ.get("CC", "gcc")
builds_anew = pytest.mark.skipif(
    bool(LIBRARY) or shutil.which(COMPILER) is None, reason="runs these tests again, with another build of the kernel"
)


@builds_anew
def test_a_library_of_another_version_leaves_the_work_to_torch(tmp_path, caplog):
    """As in an editable installation, whose sources change without a build: its structures have other fields."""
    (tmp_path / "old.c").write_text("const void *grpo_pl_kernel(int n) { return 0; }")
    library = tmp_path / "_kernels.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", str(tmp_path / "old.c"), "-o", str(library)], check=True)
    assert built_kernels(library) == {}
    assert "built from another version, and torch computes" in caplog.text


def _tested_again(sources: Path, library: Path, *flags: str, **environment: str) -> None:
    """These tests, in a process whose kernels are built with ``flags``."""
    files = [str(sources / name) for name in ("library.c", "avx512.c", "avx2.c", "baseline.c")]
    shared = ["-std=gnu11", "-fPIC", "-shared", "-pthread", *flags]
    subprocess.run([COMPILER, *shared, *files, "-lm", "-o", str(library)], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", __file__, *BESIDE],
        env={**os.environ, **environment, "DECODE_LIBRARY": str(library)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def _runtime(name: str) -> str:
    found = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.slow
@builds_anew
def test_sanitizers_find_nothing(tmp_path):
    """Each access to memory is checked, and each shift and sum of integers."""
    if not Path(_runtime("libasan.so")).is_absolute():
        pytest.skip("the compiler comes without sanitizers")
    _tested_again(
        CSRC,
        tmp_path / "_kernels.so",
        *("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        LD_PRELOAD=f"{_runtime('libasan.so')} {_runtime('libstdc++.so')}",  # whose exceptions libasan looks up at once
        ASAN_OPTIONS=f"detect_leaks=0:log_path={tmp_path / 'found'}",
        UBSAN_OPTIONS="print_stacktrace=1",
    )
    assert not list(tmp_path.glob("found*"))


@builds_anew
@pytest.mark.skipif("avx2" not in KERNELS or "avx512" in KERNELS, reason="has AVX-512, or nothing to take its place")
def test_the_kernel_of_sixteen_lanes_is_right_where_two_vectors_of_eight_make_one(tmp_path):
    sources = shutil.copytree(CSRC, tmp_path / "csrc")
    text = (sources / "avx512.c").read_text()
    lowered = re.sub(r'"avx512f,[^"]*"', '"avx2,fma"', text)
    lowered = re.sub(r"return __builtin_cpu_supports[^;]*;", "return 1;", lowered)
    (sources / "avx512.c").write_text(lowered)
    _tested_again(sources, tmp_path / "_kernels.so", "-O2", "-Wno-psabi")
    assert next(iter(built_kernels(tmp_path / "_kernels.so"))) == "avx512"
