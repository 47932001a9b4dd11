"""Tests of packed micro-batches: indices by hand, and scores and gradients equal to those of padded rows."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_pl.policy.logprobs import completion_logprobs, forward_mode, use_forward_mode
from grpo_pl.policy.packing import Rows, pack


def _rows(prompts: list[list[int]], completions: list[list[int]]) -> dict[str, torch.Tensor]:
    width, length = max(map(len, prompts)), max(1, *map(len, completions))
    return {
        "prompt_ids": torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts]),
        "prompt_mask": torch.tensor([[False] * (width - len(ids)) + [True] * len(ids) for ids in prompts]),
        "completion_ids": torch.tensor([ids + [0] * (length - len(ids)) for ids in completions]),
        "completion_mask": torch.tensor([[True] * len(ids) + [False] * (length - len(ids)) for ids in completions]),
    }


def test_pack_by_hand():
    packing = pack(Rows(**_rows([[7, 8], [7, 8], [9]], [[1, 2, 3], [4], [5, 6]])))
    #                  0  1 | 2 | 3  4 |  | 5      prompts [7 8] and [9], then all but the last of each completion
    assert packing.input_ids.tolist() == [[7, 8, 9, 1, 2, 5]]
    assert packing.position_ids.tolist() == [[0, 1, 0, 2, 3, 1]]
    assert packing.predicting.tolist() == [1, 3, 4, 1, 2, 5]
    assert packing.longest == 4
    assert [bucket.tolist() for bucket in packing.buckets] == [[[0, 1, 3, 4]], [[0, 1], [2, 5]]]
    places = torch.cat([bucket.flatten() for bucket in packing.buckets])
    assert places[packing.source].tolist() == [0, 1, 2, 3, 4, 5]


def test_observations_are_fed_and_predicted_by_nobody():
    rows = _rows([[7, 8], [7, 8]], [[1, 2, 3, 4], [5, 6]])
    written = torch.tensor([[True, False, False, True], [True, True, False, False]])
    packing = pack(Rows(**rows, action_mask=written))
    assert packing.input_ids.tolist() == pack(Rows(**rows)).input_ids.tolist() == [[7, 8, 1, 2, 3, 5]]
    assert packing.predicting.tolist() == [1, 4, 1, 5]  # before 1 and 4, and before 5 and 6


@pytest.mark.parametrize(
    ("prompts", "completions", "share", "packed"),
    [
        ([[7], [8], [7]], [[1], [2], [3]], True, [7, 8, 7]),  # equal, and no neighbours
        ([[7, 8], [7, 8]], [[1, 2], [3]], True, [7, 8, 1]),
        ([[7, 8], [7, 8]], [[1, 2], [3]], False, [7, 8, 7, 8, 1]),
        ([[0, 5], [5]], [[1, 2], [1, 2]], True, [0, 5, 5, 1, 1]),  # the first starts with the padding id
    ],
)
def test_neighbours_with_equal_prompts_share_them_unless_told_otherwise(prompts, completions, share, packed):
    assert pack(Rows(**_rows(prompts, completions)), share=share).input_ids.tolist() == [packed]


SEGMENTED = {
    **_rows([[7, 8], [7, 8], [9]], [[1, 2, 8, 3, 4, 5, 6], [4], [5, 6]]),
    "segment_index": torch.tensor([[0, 0, -1, -1, 1, -2, 2], [0] * 7, [0] * 7]),
}
"""The first row is 7 8 | 1 2, then 8 3 | 4, then 5 | 6."""
SCORED = torch.tensor([[True, True, False, False, True, False, True]]) | (torch.arange(3) > 0).unsqueeze(1)


def test_each_segment_of_a_row_is_read_as_a_row_of_its_own():
    rows = Rows(**SEGMENTED, action_mask=SCORED & SEGMENTED["completion_mask"]).unfolded()
    apart = _rows([[7, 8], [8, 3], [5], [7, 8], [9]], [[1, 2], [4], [6], [4], [5, 6]])
    for name, tensor in apart.items():
        assert torch.equal(getattr(rows, name), tensor), name
    assert torch.equal(rows.scored, apart["completion_mask"])
    assert rows.unfolded() is rows


def test_segments_are_scored_like_rows_of_their_own(model):
    rows = {**SEGMENTED, "action_mask": SCORED & SEGMENTED["completion_mask"]}
    apart = _rows([[7, 8], [8, 3], [5], [7, 8], [9]], [[1, 2], [4], [6], [4], [5, 6]])
    expected, entropies = completion_logprobs(model, **apart, temperature=0.5, with_entropy=True)
    for mode in ("packed", "chunked", "materialised"):
        use_forward_mode(model, mode)
        found, entropy = completion_logprobs(model, **rows, temperature=0.5, with_entropy=True)
        assert found.shape == SCORED.shape and not found[~rows["action_mask"]].any()
        for mine, theirs in ((found, expected), (entropy, entropies)):
            torch.testing.assert_close(mine[rows["action_mask"]], theirs[apart["completion_mask"]])


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=23,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM(config)


def _scores_and_gradients(model, rows, way: str):
    use_forward_mode(model, way)
    mask = rows["completion_mask"]
    logprobs, entropy = completion_logprobs(model, **rows, temperature=0.9, with_entropy=True)
    slope = torch.linspace(-1.0, 2.0, int(mask.sum()), dtype=logprobs.dtype)
    loss = (logprobs[mask] * slope).sum() + (entropy[mask] * slope.flip(0)).sum()
    return logprobs, entropy, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("prompts", "completions"),
    [
        ([[5, 6, 7]] * 4, [[1, 2, 3, 4, 5, 6, 7, 8], [9], [3, 3, 3], [1, 2, 3, 4]]),  # one group, four buckets
        ([[5, 6, 7], [5, 6, 7], [8], [8]], [[1, 2], [3, 4], [5, 6], [7, 8]]),
        ([[5, 6], [9, 1, 2], [5, 6]], [[], [4, 4], []]),  # empty completions
        ([[3]], [[1, 2, 3]]),
    ],
)
def test_packed_scores_and_gradients_are_those_of_padded_rows(model, prompts, completions, dtype):
    """In float32 prompts are shared; a float64 model, whose norms are float32 inside, gets each row's own."""
    rows, model = _rows(prompts, completions), model.to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    packed = _scores_and_gradients(model, rows, "packed")
    for other in ("chunked", "materialised"):
        reference = _scores_and_gradients(model, rows, other)
        torch.testing.assert_close(packed[0], reference[0], atol=tolerance, rtol=0.0)
        torch.testing.assert_close(packed[1], reference[1], atol=tolerance, rtol=0.0)
        mine, theirs = (torch.cat([grad.flatten() for grad in result[2]]) for result in (packed, reference))
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


def test_micro_batch_without_tokens_has_zero_gradient(model):
    use_forward_mode(model, "packed")
    rows = _rows([[5, 6]], [[]])
    logprobs, _ = completion_logprobs(model, **rows, temperature=1.0)
    logprobs.sum().backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


def test_packed_tokens_are_those_without_padding_and_repetition(model):
    seen: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output.shape[:-1].numel()))
    use_forward_mode(model, "packed")
    completion_logprobs(model, **_rows([[5, 6, 7]] * 3, [[1, 2, 3, 4], [1], [2, 2]]), temperature=1.0)
    assert seen == [3 + 3 + 0 + 1]


class _Attention(TorchDispatchMode):
    """Notes the types that attention and its gradient compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in str(func):
            self.types |= {value.dtype for value in args if isinstance(value, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def test_a_cpu_attends_in_float32_where_products_are_in_bfloat16(model):
    rows = _rows([[5, 6, 7]] * 2, [[1, 2, 3], [4]])
    exact = _scores_and_gradients(model, rows, "packed")[0]
    with _Attention() as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = _scores_and_gradients(model, rows, "packed")[0]
    assert seen.types == {torch.float32}
    assert not torch.equal(mixed, exact)
    torch.testing.assert_close(mixed, exact, atol=0.05, rtol=0.0)


def test_how_a_model_is_scored_does_not_hang_on_the_rounding_of_bfloat16(model):
    """Logits so large that packed and padded scores differ by more than 0.05 in bfloat16."""
    model.get_output_embeddings().weight.data *= 40
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert forward_mode(model) == "packed"
