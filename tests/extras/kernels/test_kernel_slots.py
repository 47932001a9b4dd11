"""Sequences that the kernel draws some tokens at a time: the bits of a whole rollout, whoever joins or leaves."""

import gc

import pytest
import torch

from grpo_pl.extras.kernels.decode_kernel import DecodeKernel, PackedPolicy, draw_rollout
from grpo_pl.extras.kernels.kernel_slots import Draw, KernelSlots
from grpo_pl.rollout.decoding import row_keys
from grpo_pl.rollout.engine import RolloutInterrupted
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
def test_a_long_prompt_is_read_in_parts_beside_others_with_the_same_bits(kernel: DecodeKernel):
    model = small_model()
    whole = [row for row in _whole(kernel, model) if len(row[0]) >= 6][-1]
    at = next(i for i, row in enumerate(_whole(kernel, model)) if row == whole)
    prompt, slots = PROMPTS[at // 4], KernelSlots(kernel, model, rows=4)
    slots.join([7], [_draw(99, ends=frozenset(), limit=200)])
    slots.advance(1, read=5)
    slots.join(prompt, [_draw(KEYS[at // 4][at % 4]), _draw(1, by_torch=True)])
    slots.join([8], [_draw(98, ends=frozenset(), limit=200)])
    calls = -(-len(prompt) // 5)
    for call in range(1, calls + 1):
        assert slots.reading
        advanced = slots.advance(6, read=5)
        done = call == calls
        assert advanced.lengths.tolist() == [6, 6 if done else 0, 0, 6] and advanced.undrawn == ([2] if done else [])
    assert not slots.reading
    assert (advanced.tokens[1].tolist(), advanced.logprobs[1].tolist()) == (whole[0][:6], whole[1][:6])
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(advanced.logits[0], expected, rtol=1e-4, atol=1e-4)
    slots.join(prompt, [])
    slots.keep([True] * 4)
    assert not slots.reading  # nobody waits for it


@each_kernel
def test_memory_grows_up_to_the_limit_of_a_sequence_and_end_tokens_go_with_it(kernel: DecodeKernel):
    slots, panel = KernelSlots(kernel, small_model(), rows=1), kernel.panel
    for ends in range(3):
        slots.join([1], [_draw(ends, ends=frozenset({64 + ends}), limit=2 * panel + 1)])
        while slots._sequences[0].drawn < 2 * panel + 1:
            slots.advance(min(panel, 16))
        assert slots._sequences[0].columns == 3 * panel  # and not four, which doubling gives
        slots.keep([False])
    held = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.dtype == torch.int32]
    assert not [thing for thing in held if thing.shape == (1,) and 64 <= int(thing) < 64 + 3]


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
        slots = KernelSlots(kernel, model, rows=len(numbers))
        contexts = [list(PROMPTS[number]) for number in numbers]
        for turn in range(3):
            for row, (number, context) in enumerate(zip(numbers, contexts, strict=True)):
                draw = _draw(100 * number + turn, limit=9)
                if turn:
                    slots.prepare(row, draw, feed=context[slots.held(row) :])
                else:
                    slots.join(context, [draw])
            advanced = slots.advance(9)
            for row, (number, context) in enumerate(zip(numbers, contexts, strict=True)):
                length = int(advanced.lengths[row])
                context += [*advanced.tokens[row, :length].tolist(), *range(number, number + 40)]  # an observation
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
