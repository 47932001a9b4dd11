"""Changes to the logits against figures worked out by hand, and in a batch that others share."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_pl.functional.sampling import row_key
from grpo_pl.rollout.native import slots
from grpo_pl.rollout.native.continuous import ContinuousBatch, Drawn, SequenceOptions
from grpo_pl.rollout.processors import LogitOptions, LogitProcessor
from grpo_pl.types import SampleKey, SamplingParams
from tests.rollout.drawn import UNEVEN, build_model, make_keys

LOGITS = [2.0, -1.0, 0.5, 0.0]
OUT = -math.inf


def _after(drawn: list[int], prompt: list[int] = (3,), *, temperature: float = 1.0, **options: object) -> list[float]:  # type: ignore[assignment]
    processor = LogitProcessor(LogitOptions(**options), list(prompt), ends=[3], temperature=temperature)  # type: ignore[arg-type]
    for token in drawn:
        processor(torch.tensor(LOGITS))
        processor.accept(token)
    return processor(torch.tensor(LOGITS)).tolist()


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_what_was_seen() -> None:
    assert _after([0], [1], repetition_penalty=2.0) == [1.0, -2.0, 0.5, 0.0]
    assert _after([0, 0], [1], repetition_penalty=2.0) == [1.0, -2.0, 0.5, 0.0]  # how often does not matter
    assert _after([], [0], repetition_penalty=0.5) == [4.0, -1.0, 0.5, 0.0]


def test_presence_counts_once_and_frequency_every_time_and_neither_counts_the_prompt() -> None:
    assert _after([0, 0, 2], [1], presence_penalty=0.5) == [1.5, -1.0, 0.0, 0.0]
    assert _after([0, 0, 2], [1], frequency_penalty=0.5) == [1.0, -1.0, 0.0, 0.0]
    assert _after([0], [1], presence_penalty=-1.0, frequency_penalty=-1.0) == [4.0, -1.0, 0.5, 0.0]


def test_bias_is_added_and_penalties_come_after_it() -> None:
    assert _after([], logit_bias=((1, 3.0), (2, -100.0))) == [2.0, 2.0, -99.5, 0.0]
    assert _after([], [1], logit_bias=((1, 3.0),), repetition_penalty=2.0) == [2.0, 1.0, 0.5, 0.0]


def test_bad_words_exclude_their_last_token_where_the_others_stand() -> None:
    words = ((2,), (0, 1), (1, 0, 3))
    assert _after([], bad_words=words) == [2.0, -1.0, OUT, 0.0]
    assert _after([0], bad_words=words) == [2.0, OUT, OUT, 0.0]
    assert _after([1, 0], bad_words=words) == [2.0, OUT, OUT, OUT]
    assert _after([0, 0, 3], [1], bad_words=words) == [2.0, -1.0, OUT, 0.0]
    assert _after([0], [1], bad_words=((1, 0, 3),)) == LOGITS  # the prompt is none of the completion's words


def test_no_end_before_min_tokens() -> None:
    assert _after([], min_tokens=2) == [2.0, -1.0, 0.5, OUT]
    assert _after([0], min_tokens=2) == [2.0, -1.0, 0.5, OUT]
    assert _after([0, 1], min_tokens=2) == LOGITS


@pytest.mark.parametrize(("temperature", "kept"), [(0.0, [0, 1, 2, 3]), (0.5, [0]), (1.0, [0, 2]), (2.0, [0, 1, 2, 3])])
def test_min_p_is_relative_to_the_likeliest_token_at_the_sampling_temperature(
    temperature: float, kept: list[int]
) -> None:
    """At temperature 1 the tokens have exp(0), exp(-3), exp(-1.5), exp(-2) of the best one's probability."""
    after = _after([], min_p=0.2, temperature=temperature)
    assert [i for i, value in enumerate(after) if value > OUT] == kept
    if temperature:
        p = (torch.tensor(LOGITS) / temperature).softmax(0)
        assert kept == (p >= 0.2 * p.max()).nonzero().flatten().tolist()


def test_a_mask_comes_first_and_hears_of_every_token() -> None:
    class OnlyOdd:
        heard: list[int] = []  # noqa: RUF012

        def allowed(self, vocabulary: int) -> Tensor:
            return torch.arange(vocabulary) % 2 == 1

        def accept(self, token: int) -> None:
            self.heard.append(token)

    processor = LogitProcessor(LogitOptions(logit_bias=((0, 5.0),)), [0], ends=[], temperature=1.0, mask=OnlyOdd())
    assert processor(torch.tensor(LOGITS)).tolist() == [OUT, -1.0, OUT, 0.0]
    processor.accept(1)
    assert OnlyOdd.heard == [1]


def _run(requests: list[tuple[list[int], SampleKey, SequenceOptions]], family: str = "qwen2") -> list[list[Drawn]]:
    batch = ContinuousBatch(build_model(family), eos_token_ids=[0, 1], max_rows=len(requests))
    drawn: dict[int, list[Drawn]] = {}
    order = []
    for prompt, key, options in requests:
        number = row_key(key.seed, key.split, key.step, key.attempt, key.prompt_id, key.sample)
        order += batch.add(prompt, [number], options)
    while len(batch):
        for d in batch.step():
            drawn.setdefault(d.sequence, []).append(d)
    return [drawn[sequence] for sequence in order]


def test_neighbours_with_penalties_change_no_bit_of_a_plain_sequence() -> None:
    sampling = SamplingParams(max_completion_length=20)
    plain = SequenceOptions(sampling=sampling, top_logprobs=2, ignore_eos=True)  # the batch keeps its shape
    bent = replace(plain, logits=LogitOptions(presence_penalty=2.0, repetition_penalty=1.5, min_p=0.1))
    keys = [group[0] for group in make_keys(3, 1)]

    def three(middle: SequenceOptions) -> list[list[Drawn]]:
        return _run(list(zip(UNEVEN, keys, [plain, middle, plain], strict=True)))

    alone, together = three(plain), three(bent)
    assert [together[0], together[2]] == [alone[0], alone[2]]
    assert together[1] != alone[1]


def test_what_a_batch_draws_obeys_the_options() -> None:
    def draw(**options: object) -> list[list[Drawn]]:
        stop = options.pop("stop_token_ids", ())
        logits = LogitOptions(**options) if options else None  # type: ignore[arg-type]
        both = SequenceOptions(sampling=SamplingParams(max_completion_length=24), logits=logits, stop_token_ids=stop)  # type: ignore[arg-type]
        keys = [key for group in make_keys(3, 8) for key in group]
        return _run([(UNEVEN[i // 8], key, both) for i, key in enumerate(keys)])

    def tokens(rows: list[list[Drawn]]) -> list[list[int]]:
        return [[token for d in row for token in d.tokens] for row in rows]

    free = tokens(draw())
    assert min(map(len, free)) < 10  # otherwise what follows shows nothing
    assert 24 > min(len(row) for row in tokens(draw(min_tokens=10))) >= 11  # ten, then the end token
    common = max(range(2, 37), key=lambda t: sum(row.count(t) for row in free))
    assert all(common not in row for row in tokens(draw(bad_words=((common,),))))
    stopped = draw(stop_token_ids=(common,))
    for row, drawn in zip(tokens(stopped), stopped, strict=True):
        assert row.index(common) == len(row) - 1 if common in row else True
        assert drawn[-1].finish == ("stop" if row[-1] in (0, 1, common) else "length")
    repeats = [len(row) - len(set(row)) for row in tokens(draw(frequency_penalty=2.0, presence_penalty=2.0))]
    assert sum(repeats) < sum(len(row) - len(set(row)) for row in free)
    assert all(len(set(row)) == 1 for row in tokens(draw(logit_bias=((7, 100.0),))))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_prompts_own_tokens_are_scored_as_the_model_scores_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(family).eval()
    prompt = [3 + i * 7 % 30 for i in range(128)]
    batch = ContinuousBatch(model, eos_token_ids=[0, 1], max_rows=2)
    monkeypatch.setattr(slots, "_POSITIONS", 50)  # so that a prompt is more than one slice
    for length in (1, 2, 90, 100, 128):
        ids = prompt[:length]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        scored = batch.prompt_logprobs(ids, top=3)
        assert [s.token for s in scored] == ids
        assert scored[0].logprob is None
        assert scored[0].top == ()
        for i, s in enumerate(scored[1:]):
            assert s.logprob == pytest.approx(expected[i, ids[i + 1]].item(), abs=1e-4)
            best = expected[i].topk(3)
            assert [p for _, p in s.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert dict(s.top).get(s.token, s.logprob) == s.logprob  # the same number, to the last bit
    assert len(batch) == 0
