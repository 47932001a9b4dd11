"""Sequences that the kernel draws some tokens at a time: the bits of a whole rollout, whoever joins or leaves."""

import pytest
import torch

from grpo_pl.rollout.decoding import row_keys
from grpo_pl.rollout.engine import RolloutInterrupted
from grpo_pl.rollout.native.decode_kernel import DecodeKernel, PackedPolicy, draw_rollout
from grpo_pl.rollout.native.kernel_slots import Draw, KernelSlots, KernelTurns
from tests.kernels import KERNELS, each_kernel, named_keys, small_model

pytestmark = pytest.mark.skipif(not KERNELS, reason="no C compiler has built the decode kernel")

LIMIT, ENDS = 70, frozenset({6, 20})
PROMPTS = [[(3 * p + i) % 64 for i in range(1 + 13 * p)] for p in range(6)]
KEYS = torch.tensor(row_keys(named_keys(6, 4))).view(6, 4).tolist()


def _draw(key: int, **changes) -> Draw:
    return Draw(**{"key": key, "temperature": 1.0, "limit": LIMIT, "ends": ENDS, **changes})


def _whole(kernel: DecodeKernel, model) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of every row of one rollout."""
    with torch.no_grad():
        tokens, logprobs, lengths = draw_rollout(
            kernel,
            PackedPolicy(kernel, model, columns=max(map(len, PROMPTS)) + LIMIT),
            PROMPTS,
            owners=torch.arange(6).repeat_interleave(4),
            keys=torch.tensor(KEYS).flatten(),
            limits=torch.full((24,), LIMIT),
            temperature=1.0,
            stop_tokens=sorted(ENDS),
            ask=lambda *_: None,
        )
    return [(tokens[r, :n].tolist(), logprobs[r, :n].tolist()) for r, n in enumerate(lengths.tolist())]


@each_kernel
@pytest.mark.parametrize(("steps", "threads"), [(1, 1), (3, 2), (7, 4), (64, 2)])
def test_sequences_that_join_and_leave_have_the_bits_of_a_rollout(kernel: DecodeKernel, steps: int, threads: int):
    """A prompt joins before every call; the caches of own tokens grow from one panel to several."""
    model, before = small_model(), torch.get_num_threads()
    slots, names, drawn = KernelSlots(kernel, model, rows=24), [], {}
    torch.set_num_threads(threads)
    try:
        for call in range(6 * LIMIT):
            if call < 6:
                slots.join(PROMPTS[call], [_draw(key) for key in KEYS[call]])
                names += [4 * call + i for i in range(4)]
            advanced = slots.advance(steps)
            alive = []
            for row, (name, length) in enumerate(zip(names, advanced.lengths.tolist(), strict=True)):
                tokens, logprobs = drawn.setdefault(name, ([], []))
                tokens += advanced.tokens[row, :length].tolist()
                logprobs += advanced.logprobs[row, :length].tolist()
                alive.append(tokens[-1] not in ENDS and len(tokens) < LIMIT)
            names = [names[row] for row in slots.keep(alive)]
            if call >= 6 and not names:
                break
    finally:
        torch.set_num_threads(before)
    assert [drawn[name] for name in range(24)] == _whole(kernel, model)


@each_kernel
def test_a_sequence_that_comes_back_goes_on_with_the_same_bits(kernel: DecodeKernel):
    model = small_model()
    tokens, logprobs = max(_whole(kernel, model), key=lambda row: len(row[0]))
    row = next(i for i, other in enumerate(_whole(kernel, model)) if other[0] == tokens)
    slots = KernelSlots(kernel, model, rows=1)
    for stay in (1, len(tokens) // 2, len(tokens) - 1):
        slots.join(PROMPTS[row // 4], [_draw(KEYS[row // 4][row % 4], drawn=tokens[:stay])])
        advanced = slots.advance(LIMIT)
        rest = int(advanced.lengths[0])
        assert (advanced.tokens[0, :rest].tolist(), advanced.logprobs[0, :rest].tolist()) == (
            tokens[stay:],
            logprobs[stay:],
        )
        slots.keep([False])


@each_kernel
def test_logits_are_the_models_own_beside_sequences_that_are_drawn(kernel: DecodeKernel):
    model = small_model(vocabulary=1100)
    slots, prompt = KernelSlots(kernel, model, rows=2), PROMPTS[3]
    slots.join(prompt, [_draw(5, by_torch=True), _draw(6)])
    fed = []
    for token in (3, 1099, 41):
        advanced = slots.advance(1)
        assert advanced.undrawn == [0] and advanced.lengths.tolist() == [0, 1]
        with torch.no_grad():
            expected = model(torch.tensor([[*prompt, *fed]])).logits[0, -1]
        torch.testing.assert_close(advanced.logits[0], expected, rtol=1e-4, atol=1e-4)
        slots.feed(0, token)
        fed.append(token)
    long = [i % 1100 for i in range(0, 900, 5)]  # more than is read or handed out at once
    with torch.no_grad():
        expected = model(torch.tensor([long])).logits[0]
    torch.testing.assert_close(torch.cat(list(slots.prompt_logits(long))), expected, rtol=1e-4, atol=1e-4)


@each_kernel
def test_turns_go_on_from_what_is_kept_with_bits_that_no_neighbour_changes(kernel: DecodeKernel):
    model = small_model()

    def play(numbers: list[int]) -> list[list[int]]:
        turns = KernelTurns(kernel, model, rows=len(numbers))
        contexts = [list(PROMPTS[number]) for number in numbers]
        for turn in range(3):
            draws = [_draw(100 * number + turn, limit=9) for number in numbers]
            tokens, logprobs = turns.draw(contexts, draws, lambda *_: None)
            for number, context, row, logprob in zip(numbers, contexts, tokens, logprobs, strict=True):
                length = int((logprob != 0).sum())
                context += [*row[:length].tolist(), *range(number, number + 40)]  # an observation
        return contexts

    together = play([0, 2, 3, 5])
    assert [play([number])[0] for number in (0, 2, 3, 5)] == together


@each_kernel
def test_what_would_reach_out_of_bounds_is_refused(kernel: DecodeKernel):
    slots = KernelSlots(kernel, small_model(), rows=1)
    with pytest.raises(ValueError, match="a prompt has the token 64"):
        slots.join([64], [_draw(1)])
    with pytest.raises(ValueError, match="a prompt has the token -1"):
        slots.join([1], [_draw(1, drawn=[-1])])
    with pytest.raises(AssertionError):
        KernelSlots(kernel, small_model(), rows=1).join([1], [_draw(1), _draw(2)])


@each_kernel
def test_a_call_is_stopped_from_within(kernel: DecodeKernel):
    asked = []

    def ask(tokens: int, finished: int) -> None:
        asked.append(tokens)
        raise RolloutInterrupted

    slots = KernelSlots(kernel, small_model(layers=4), rows=512)
    slots.join([1, 2], [_draw(key, ends=frozenset(), limit=500) for key in range(512)])
    with pytest.raises(RolloutInterrupted):
        slots.advance(500, ask)
    assert len(asked) == 1 and 0 <= asked[0] < 512 * 500
