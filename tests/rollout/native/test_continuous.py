"""Continuous batching against the engines: whoever joins or leaves, a sequence draws what its key says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.extras.kernels.decode_kernel import built_kernels
from grpo_pl.functional.gemm import multiplies_bfloat16
from grpo_pl.functional.sampling import sample_key
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.trained import ServedModel
from grpo_pl.rollout.native import slots
from grpo_pl.rollout.native.continuous import ContinuousBatch, Drawn, SequenceOptions, batch_of
from grpo_pl.rollout.native.decoder_choice import TORCH
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.rollout.processors import LogitOptions
from grpo_pl.types import SamplingParams
from tests.rollout.drawn import UNEVEN, build_model, generate, make_keys, rows_of

EOS = [0, 1]


@pytest.fixture(params=[TORCH, "kernel"])
def decoder(request: pytest.FixtureRequest) -> str:
    if request.param == TORCH:
        return TORCH
    if not built_kernels() or request.node.callspec.params.get("family") == "gpt2":
        pytest.skip("no decode kernel computes this model here")
    return next(iter(built_kernels()))


class Collector:
    """Steps a batch and keeps what every sequence got."""

    def __init__(self, batch: ContinuousBatch) -> None:
        self.batch, self.drawn = batch, {}  # type: ignore[var-annotated]

    def step(self, most: int = 1) -> list[Drawn]:
        drawn = self.batch.step(most)
        for d in drawn:
            self.drawn.setdefault(d.sequence, []).append(d)
        return drawn

    def drain(self) -> None:
        while len(self.batch):
            self.step(5)

    def tokens(self, sequence: int) -> list[int]:
        return [token for d in self.drawn[sequence] for token in d.tokens]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
def test_sequences_that_join_at_different_times_draw_what_the_engine_draws(decoder: str, family: str) -> None:
    model = build_model(family)
    keys = make_keys(3, 4)
    options = SequenceOptions(sampling=SamplingParams(max_completion_length=24))
    rollout = generate(PlainEngine(), model, UNEVEN, keys, eos=EOS, length=24)

    run = Collector(ContinuousBatch(model, eos_token_ids=EOS, decoder=decoder, max_rows=12))
    sequences = []
    for prompt, group in zip(UNEVEN, keys, strict=True):
        sequences += run.batch.add(prompt, [sample_key(key) for key in group], options)
        for _ in range(3):
            run.step()
    run.drain()

    assert [run.tokens(s) for s in sequences] == rows_of(rollout)
    assert [run.drawn[s][-1].finish for s in sequences] == rollout.finish_reasons
    mine = [logprob for s in sequences for d in run.drawn[s] for logprob in d.logprobs]
    torch.testing.assert_close(
        torch.tensor(mine), rollout.sampling_logprobs[rollout.completion_mask], rtol=1e-4, atol=1e-4
    )


def _served(folder: Path, sampling: SamplingParams, **trained: str) -> ServedModel:
    policy = PolicyConfig(from_scratch={"model_type": "qwen2"})
    parts: dict[str, Any] = {"policy": policy, "checkpoint": None, "template": PromptTemplate(), "rewards": []}
    return ServedModel(name="model", source=folder, sampling=sampling, **parts, **trained)


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this processor has no products in bfloat16")
def test_a_batch_computes_in_the_precision_of_the_training(tmp_path: Path) -> None:
    model, (keys, *_) = build_model("qwen2"), make_keys(1, 8)
    sampling = SamplingParams(max_completion_length=1)

    def logprobs(precision: str) -> torch.Tensor:
        run = Collector(batch_of(_served(tmp_path, sampling, precision=precision), model, 8))
        options = SequenceOptions(sampling=sampling)
        sequences = run.batch.add(UNEVEN[0], [sample_key(key) for key in keys], options)
        run.drain()
        return torch.tensor([run.drawn[sequence][0].logprobs[0] for sequence in sequences])

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = generate(NativeEngine(), model, UNEVEN[:1], [keys], eos=EOS, length=1)
    exact, rounded = logprobs("32-true"), logprobs("bf16-mixed")
    torch.testing.assert_close(rounded, expected.sampling_logprobs.flatten(), atol=1e-2, rtol=0.0)
    assert not torch.allclose(rounded, exact, atol=1e-4) and torch.equal(exact, logprobs(""))


@pytest.mark.skipif(not built_kernels(), reason="no C compiler has built the decode kernel")
def test_a_run_that_the_kernel_drew_is_served_with_the_same_bits(tmp_path: Path) -> None:
    model, keys, engine = build_model("qwen2"), make_keys(3, 4), NativeEngine()
    engine.decoder = next(iter(built_kernels()))
    sampling = SamplingParams(max_completion_length=24)
    rollout = generate(engine, model, UNEVEN, keys, eos=[], length=24)
    run = Collector(batch_of(_served(tmp_path, sampling, decoder=engine.decoder), model, 12))
    options, sequences = SequenceOptions(sampling=sampling, ignore_eos=True), list[int]()
    for prompt, group in zip(UNEVEN, keys, strict=True):
        sequences += run.batch.add(prompt, [sample_key(key) for key in group], options)
        run.step(3)
    run.drain()
    assert [run.tokens(s) for s in sequences] == rollout.completion_ids.tolist()
    logprobs = [[logprob for d in run.drawn[s] for logprob in d.logprobs] for s in sequences]
    assert logprobs == rollout.sampling_logprobs.tolist()


def test_a_long_prompt_that_joins_beside_others_draws_what_it_draws_alone() -> None:
    """Read in parts, by the kernel, while others of another sampling are drawn; one of two leaves before its end."""
    if not built_kernels():
        pytest.skip("no decode kernel computes this model here")
    model, long = build_model("qwen2"), [(7 * i) % 30 + 2 for i in range(150)]
    kernel = next(iter(built_kernels()))
    plain = SequenceOptions(sampling=SamplingParams(max_completion_length=12))
    truncated = SequenceOptions(sampling=SamplingParams(max_completion_length=12, top_k=5))
    other = SequenceOptions(sampling=SamplingParams(max_completion_length=40, top_p=0.9), ignore_eos=True)

    def alone(prompt: list[int], key: int, options: SequenceOptions) -> list[int]:
        run = Collector(ContinuousBatch(model, eos_token_ids=EOS, decoder=kernel, max_rows=1))
        (sequence,) = run.batch.add(prompt, [key], options)
        run.drain()
        return run.tokens(sequence)

    run = Collector(ContinuousBatch(model, eos_token_ids=EOS, decoder=kernel, max_rows=5))
    asked = [([5, 9], 1, other)]
    sequences = run.batch.add([5, 9], [1], other)
    run.step()
    for key, options in ((2, plain), (3, truncated)):
        asked.append((long, key, options))
        sequences += run.batch.add(long, [key], options)
    gone = run.batch.add(long[::-1], [4], plain)
    for place, count in enumerate((1, 1, 3)):  # 64, 128 and 150 tokens of the long ones
        drawn = run.step()
        assert len(drawn) == count
        if place == 0:
            run.batch.remove(gone)
    run.drain()
    assert [run.tokens(s) for s in sequences] == [alone(*each) for each in asked]


@pytest.mark.parametrize(("family", "stay"), [("qwen2", 1), ("qwen2", 64), ("qwen2", 65), ("gpt2", 7)])
def test_a_sequence_that_left_goes_on_where_it_was(decoder: str, family: str, stay: int) -> None:
    """Its penalties and random numbers, too: 64 of these are made at once."""
    model, ((key, other),) = build_model(family), make_keys(1, 2)
    penalised = LogitOptions(repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=70)
    options = SequenceOptions(sampling=SamplingParams(max_completion_length=75), ignore_eos=True, logits=penalised)
    whole = Collector(ContinuousBatch(model, eos_token_ids=EOS, decoder=decoder, max_rows=2))
    (expected,) = whole.batch.add(UNEVEN[0], [sample_key(key)], options)
    whole.drain()
    run = Collector(ContinuousBatch(model, eos_token_ids=EOS, decoder=decoder, max_rows=2))
    (first,) = run.batch.add(UNEVEN[0], [sample_key(key)], options)
    for _ in range(stay):
        run.step()
    run.batch.remove([first])
    run.batch.add(UNEVEN[1], [sample_key(other)], options)  # takes its place
    run.step()
    (again,) = run.batch.add(UNEVEN[0], [sample_key(key)], options, drawn=run.tokens(first))
    run.drain()
    assert run.tokens(first) + run.tokens(again) == whole.tokens(expected)
    assert len(whole.tokens(expected)) == 75


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_removing_sequences_changes_nothing_for_the_others(decoder: str, family: str) -> None:
    model, keys = build_model(family), make_keys(3, 4)
    expected = rows_of(generate(PlainEngine(), model, UNEVEN, keys, eos=EOS, length=20))
    options = SequenceOptions(sampling=SamplingParams(max_completion_length=20))
    run = Collector(ContinuousBatch(model, eos_token_ids=EOS, decoder=decoder, max_rows=12))
    sequences = [
        s
        for prompt, group in zip(UNEVEN, keys, strict=True)
        for s in run.batch.add(prompt, [sample_key(k) for k in group], options)
    ]
    run.batch.remove([sequences[1]])  # before its first token
    run.step()
    gone = [sequences[0], sequences[5], sequences[11]]
    before = len(run.batch)
    still = [s for s in gone if run.drawn[s][-1].finish is None]
    run.batch.remove(gone)
    assert len(run.batch) == before - len(still)
    run.drain()
    for i, sequence in enumerate(sequences):
        if i == 1:
            assert sequence not in run.drawn
        elif sequence in gone:
            assert len(run.drawn[sequence]) == 1
        else:
            assert run.tokens(sequence) == expected[i]


@pytest.mark.parametrize(("family", "length"), [("qwen3", 70), ("gpt2", 20)])  # more than one block of noise, and less
def test_prompts_of_all_lengths_that_join_at_once_draw_what_the_engine_draws(
    decoder: str, family: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_PREFILL_TOKENS", 24)  # so that several passes are needed
    model, keys = build_model(family), make_keys(6, 2)
    prompts = [[5], [7] * 20, [9, 1], [3, 4, 5, 6, 7], [2, 8, 3], [6] * 4]
    expected = rows_of(generate(PlainEngine(), model, prompts, keys, eos=[], length=length))
    run = Collector(ContinuousBatch(model, eos_token_ids=[], decoder=decoder, max_rows=12))
    options = SequenceOptions(sampling=SamplingParams(max_completion_length=length))
    sequences = [
        run.batch.add(prompt, [sample_key(k) for k in group], options)
        for prompt, group in zip(prompts, keys, strict=True)
    ]
    run.drain()
    assert [run.tokens(s) for group in sequences for s in group] == expected


def test_ignore_eos_draws_the_full_length(decoder: str) -> None:
    run = Collector(ContinuousBatch(build_model("qwen2"), eos_token_ids=list(range(37)), decoder=decoder, max_rows=1))
    options = SequenceOptions(sampling=SamplingParams(max_completion_length=9), ignore_eos=True)
    (sequence,) = run.batch.add([3, 4], [1], options)
    run.drain()
    assert len(run.tokens(sequence)) == 9
    assert run.drawn[sequence][-1].finish == "length"


def test_top_logprobs_are_those_of_the_distribution_drawn_from(decoder: str) -> None:
    model = build_model("qwen2").eval()
    sampling = SamplingParams(max_completion_length=1, temperature=0.5, top_k=3)
    run = Collector(ContinuousBatch(model, eos_token_ids=[], decoder=decoder, max_rows=1))
    run.batch.add([3, 4, 5], [17], SequenceOptions(sampling=sampling, top_logprobs=5))
    (drawn,) = run.step()
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, 5]])).logits[0, -1] / 0.5
    best = logits.topk(3)
    ((top,), (token,), (logprob,)) = drawn.tops, drawn.tokens, drawn.logprobs
    assert [token for token, _ in top] == best.indices.tolist()  # two of the five have no mass
    torch.testing.assert_close(
        torch.tensor([lp for _, lp in top]), best.values.log_softmax(-1).detach(), rtol=1e-4, atol=1e-4
    )
    assert dict(top)[token] == pytest.approx(logprob, abs=1e-5)


def test_more_sequences_than_places_are_refused(decoder: str) -> None:
    batch = ContinuousBatch(build_model("qwen2"), eos_token_ids=EOS, decoder=decoder, max_rows=3)
    options = SequenceOptions(sampling=SamplingParams(max_completion_length=4))
    batch.add([3], [1, 2], options)
    with pytest.raises(ValueError, match="2 of 3 places"):
        batch.add([3], [3, 4], options)
    with pytest.raises(ValueError, match="no tokens"):
        batch.add([], [3], options)


def test_what_cannot_go_on_is_refused_when_it_joins_and_the_batch_goes_on(decoder: str) -> None:
    model = build_model("qwen2")
    run = Collector(ContinuousBatch(model, eos_token_ids=EOS, decoder=decoder, max_rows=4))
    options, size = SequenceOptions(sampling=SamplingParams(max_completion_length=6)), model.config.vocab_size
    (sequence,) = run.batch.add([3, 4], [7], SequenceOptions(sampling=options.sampling, ignore_eos=True))
    run.step(2)
    for prompt, drawn in (([3, size], ()), ([-1], ()), ([3], (4, size)), ([3], (4, EOS[1])), ([3], (4,) * 6)):
        with pytest.raises(ValueError, match=r"vocabulary|nothing is left to draw"):
            run.batch.add(prompt, [8], options, drawn=drawn)
    assert len(run.batch) == 1
    (other,) = run.batch.add([3], [9], options, drawn=(4,) * 5)
    run.drain()
    assert (len(run.tokens(sequence)), len(run.tokens(other))) == (6, 1)
