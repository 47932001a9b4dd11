"""Activations that are computed again are computed as they were at first: packed, with shared prompts, and fused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from grpo_pl.functional.accelerated import SWITCH
from grpo_pl.policy.checkpointing import checkpoint_activations
from grpo_pl.policy.logprobs import completion_logprobs, forward_mode
from tests.rollout.drawn import build_model
from tests.training.test_microbatches import in_c


@pytest.fixture
def rows() -> dict[str, Tensor]:
    """Eight completions of up to 12 tokens, of two prompts with 9 and 5."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, 19, (2, 9), generator=draw).repeat_interleave(4, 0)
    lengths = torch.tensor([12, 3, 7, 1, 5, 12, 2, 4])
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.arange(9) >= torch.tensor([0] * 4 + [4] * 4).unsqueeze(1),
        "completion_ids": torch.randint(4, 19, (8, 12), generator=draw),
        "completion_mask": torch.arange(12) < lengths.unsqueeze(1),
    }


def _gradients(model: PreTrainedModel, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[int]]:
    """Log-probabilities, the gradient of their sum, and the positions that entered the first layer at each pass."""
    forward_mode(model)  # tries it
    entered: list[int] = []
    first = model.model.layers[0].input_layernorm
    watch = first.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0][..., 0].numel()))
    model.zero_grad()
    logprobs, _ = completion_logprobs(model.train(), **rows, temperature=1.0)
    logprobs.sum().backward()
    watch.remove()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), entered


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("kernels", ["torch", pytest.param("", marks=in_c)])
def test_a_second_pass_is_the_first_one(
    rows: dict[str, Tensor], family: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, kernels)
    logprobs, gradient, entered = _gradients(build_model(family), rows)
    again = build_model(family)
    checkpoint_activations(again)
    assert forward_mode(again) == "packed"
    theirs = _gradients(again, rows)
    # both prompts once, and of each completion all but the last token; padded rows were 8 · 21 = 168
    assert entered == [14 + 38] and theirs[2] == entered * 2
    assert torch.equal(theirs[0], logprobs) and torch.equal(theirs[1], gradient)


def test_layers_that_somebody_else_has_compute_again_take_padded_rows(rows: dict[str, Tensor]) -> None:
    """As that pass would know nothing of a packing."""
    model = build_model("qwen2").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert forward_mode(model) == "chunked"
    expected = _gradients(build_model("qwen2"), rows)
    found = _gradients(model, rows)
    assert found[2] == [168, 168]
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0.0)
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-4)


def test_a_sharded_policy_computes_again_what_it_has_gathered(rows: dict[str, Tensor], tmp_path: Path) -> None:
    plain, again = build_model("qwen2"), build_model("qwen2")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for model in (plain, again):
            forward_mode(model)
            for unit in (*model.model.layers, model):
                fully_shard(unit, mesh=mesh)
        checkpoint_activations(again)
        gradients = []
        for model in (plain, again):
            completion_logprobs(model, **rows, temperature=1.0)[0].sum().backward()
            gradients.append([p.grad.full_tensor() for p in model.parameters()])
        assert all(map(torch.equal, *gradients))
    finally:
        torch.distributed.destroy_process_group()


def test_a_pass_without_a_packing_is_repeated_without_one() -> None:
    """As a value head or a model of one's own makes it, outside of scoring."""
    plain, again = build_model("qwen2").train(), build_model("qwen2").train()
    checkpoint_activations(again)
    ids = torch.arange(4, 16).view(2, 6)
    for model in (plain, again):
        model(input_ids=ids).logits.square().sum().backward()
    for mine, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
