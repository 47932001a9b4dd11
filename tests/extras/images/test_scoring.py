"""Log-probabilities and gradients of prompts with images, against transformers' own padded forward."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_pl.extras.images.reading import ImageReading
from grpo_pl.policy.checkpointing import checkpoint_activations
from grpo_pl.policy.inputs import EncodedPrompt, encode_prompt, reading_of
from grpo_pl.policy.loading import load_model, load_tokenizer
from grpo_pl.policy.logprobs import completion_logprobs, forward_mode, use_forward_mode
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.training.microbatches import micro_batches, rollout_rows
from grpo_pl.types import Rollout, RowInputs
from tests.extras.images.test_models import split_into_tiles
from tests.images import FAMILIES, image_policy, picture

PROBLEMS = [
    ("How many?", (picture(0),)),
    ("How many?", (picture(1),)),  # the same tokens, another image
    ("1+1=", ()),
    ("Which is larger?", (picture(2, 40, 20), picture(0), picture(3, 8, 30))),
    ("?", (picture(4), picture(4))),
]
LENGTHS = (5, 1, 3)
"""Tokens of the completions of each prompt."""


def _rollout(tokenizer: Any) -> Rollout:
    encoded = [encode_prompt(asked, {"images": shown}, PromptTemplate(), tokenizer) for asked, shown in PROBLEMS]
    rows: list[EncodedPrompt] = [prompt for prompt in encoded for _ in LENGTHS]
    generator = torch.Generator().manual_seed(0)
    lengths = LENGTHS * len(PROBLEMS)
    completions = [torch.randint(3, 90, (length,), generator=generator) for length in lengths]

    def padded(values: list[Tensor], side: str) -> Tensor:
        return pad_sequence(values, batch_first=True, padding_side=side)

    prompts = [torch.tensor(prompt.ids) for prompt in rows]
    return Rollout(
        group_size=len(LENGTHS),
        prompt_ids=padded(prompts, "left"),
        prompt_mask=padded([torch.ones_like(ids).bool() for ids in prompts], "left"),
        completion_ids=padded(completions, "right"),
        completion_mask=padded([torch.ones_like(ids).bool() for ids in completions], "right"),
        sampling_logprobs=torch.zeros(len(rows), max(LENGTHS)),
        finish_reasons=["length"] * len(rows),
        inputs=RowInputs([prompt.inputs for prompt in rows]),
    )


def _by_transformers(model: Any, rollout: Rollout) -> Tensor:
    """(B, T), by the model's own forward on one row after the other, with its pixels."""
    found = []
    for row, inputs in enumerate(rollout.inputs.of):  # type: ignore[union-attr]
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
        completion = rollout.completion_ids[row][rollout.completion_mask[row]]
        further = {} if inputs is None else dict(inputs.tensors)
        logits = model(input_ids=torch.cat([prompt, completion]).unsqueeze(0), **further).logits[0]
        logprobs = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1]
        found.append(logprobs.gather(1, completion.unsqueeze(1)).squeeze(1))
    return pad_sequence(found, batch_first=True)


def _cut(model: Any, rollout: Rollout, budget: int, *, share: bool) -> Tensor:
    rows = torch.arange(len(rollout.finish_reasons))
    found = torch.zeros(rollout.completion_ids.shape, dtype=model.dtype)
    for part in micro_batches(rollout, rows, budget, share_prompts=share):
        scored, _ = completion_logprobs(model, **rollout_rows(rollout, part), temperature=1.0)
        found = found.index_put((part,), torch.nn.functional.pad(scored, (0, found.shape[1] - scored.shape[1])))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("budget", [60, 110, 10_000])
def test_packed_rows_have_the_log_probabilities_and_gradients_of_the_padded_forward(
    family: str, dtype: torch.dtype, budget: int
) -> None:
    policy = image_policy(family, train_vision=True)
    tokenizer = load_tokenizer(policy)
    model: Any = load_model(policy, tokenizer).to(dtype)
    rollout = _rollout(tokenizer)
    assert forward_mode(model) == "packed"
    weights = torch.rand(rollout.completion_ids.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for logprobs in (_by_transformers(model, rollout), _cut(model, rollout, budget, share=True)):
        model.zero_grad()
        (logprobs * weights).sum().backward()
        results.append(
            (logprobs.detach(), {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None})
        )
    (expected, gradients), (found, ours) = results
    assert (expected - found).abs().max() <= (1e-9 if dtype == torch.float64 else 5e-5)
    assert gradients.keys() == ours.keys() and any("vision" in name for name in ours)
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    apart = torch.stack([(g - ours[name]).double().norm() for name, g in gradients.items()]).norm()
    assert apart <= (1e-8 if dtype == torch.float64 else 1e-4) * norm


@pytest.mark.parametrize("mode", ["packed", "chunked", "materialised"])
def test_every_mode_reads_the_images(mode: Any) -> None:
    policy = image_policy()
    tokenizer = load_tokenizer(policy)
    model: Any = load_model(policy, tokenizer).double()
    rollout = _rollout(tokenizer)
    use_forward_mode(model, mode)
    with torch.no_grad():
        found = _cut(model, rollout, 10_000, share=mode == "packed")
        assert (found - _by_transformers(model, rollout)).abs().max() <= 1e-9


def test_tiles_and_recomputed_activations_change_nothing(tmp_path: Path) -> None:
    policy = replace(split_into_tiles(tmp_path), train_vision=True)
    tokenizer = load_tokenizer(policy)
    model: Any = load_model(policy, tokenizer).double()
    model.config.get_text_config().max_position_embeddings = 600
    rollout = _rollout(tokenizer)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint_activations(model)
        model.zero_grad()
        found = _cut(model, rollout, 800, share=True)
        found.sum().backward()
        assert (found - _by_transformers(model, rollout)).abs().max() <= 1e-9
        gradients.append(torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-9 * gradients[0].norm()


def test_an_image_changes_what_follows_and_is_encoded_once_for_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = image_policy()
    tokenizer = load_tokenizer(policy)
    model: Any = load_model(policy, tokenizer)
    rollout = _rollout(tokenizer)
    forward_mode(model)
    encoded = list[int]()
    read = type(model).get_image_features

    def counted(self: Any, pixel_values: Tensor, **more: Any) -> Any:
        encoded.append(pixel_values.shape[0] * pixel_values.shape[1])
        return read(self, pixel_values, **more)

    monkeypatch.setattr(type(model), "get_image_features", counted)
    with torch.no_grad():
        found = _cut(model, rollout, 10_000, share=True)
    assert sum(encoded) == 1 + 1 + 3 + 2  # images of different prompts, not of the 15 rows
    assert not torch.allclose(found[1:2], found[4:5])  # rows of the first two prompts, whose tokens are equal
    swapped = copy.copy(rollout)
    order = [3, 4, 5, 0, 1, 2, *range(6, 15)]
    object.__setattr__(swapped, "inputs", rollout.inputs[torch.tensor(order)])  # type: ignore[index]
    with torch.no_grad():
        other = _cut(model, swapped, 10_000, share=True)
    assert (other[:6] - found[:6]).abs().max() > 1e-3
    assert torch.allclose(other[6:], found[6:], atol=1e-5)


def test_a_frozen_tower_has_no_gradient_and_the_rest_has_the_same() -> None:
    gradients = []
    for train_vision in (True, False):
        policy = image_policy(train_vision=train_vision)
        tokenizer = load_tokenizer(policy)
        model: Any = load_model(policy, tokenizer).double()
        _cut(model, _rollout(tokenizer), 10_000, share=True).sum().backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    seen, frozen = gradients
    assert not any("vision_model" in name for name in frozen)
    assert {name for name in seen if "vision_model" not in name} == frozen.keys()
    assert any("connector" in name for name in frozen)
    for name, gradient in frozen.items():
        assert (gradient - seen[name]).abs().max() <= 1e-9 * max(1.0, float(seen[name].abs().max())), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_trained_weight_has_a_gradient_where_no_prompt_has_an_image(family: str) -> None:
    policy = image_policy(family, train_vision=True)
    tokenizer = load_tokenizer(policy)
    model: Any = load_model(policy, tokenizer)
    rollout = _rollout(tokenizer)
    part = rollout_rows(rollout, torch.tensor([6, 7]))
    assert part["inputs"].keys == [None, None]
    completion_logprobs(model, **part, temperature=1.0)[0].sum().backward()
    for name, weight in model.named_parameters():
        assert (weight.grad is not None) == weight.requires_grad, name
        if "vision" in name and weight.grad is not None:
            assert not weight.grad.any()


def test_a_completion_with_the_token_of_an_image_is_refused() -> None:
    policy = image_policy()
    tokenizer = load_tokenizer(policy)
    model: Any = load_model(policy, tokenizer)
    rollout = _rollout(tokenizer)
    rollout.completion_ids[0, 1] = model.config.image_token_id
    with pytest.raises(ValueError, match="may not hold the token of an image"):
        _cut(model, rollout, 10_000, share=True)


def test_a_model_of_text_refuses_prompts_with_images() -> None:
    tokenizer = load_tokenizer(image_policy())
    policy = image_policy()
    model: Any = load_model(policy, tokenizer)
    assert isinstance(reading_of(model), ImageReading)
    del model._grpo_pl_reading
    with pytest.raises(ValueError, match="images: true"):
        completion_logprobs(model, **rollout_rows(_rollout(tokenizer), torch.arange(3)), temperature=1.0)


def test_a_share_without_rows_has_no_part() -> None:
    """As of text, where all rewards of a rollout are equal."""
    rollout, rows = _rollout(load_tokenizer(image_policy())), torch.tensor([], dtype=torch.int64)
    for share in (False, True):
        assert micro_batches(rollout, rows, 100, share_prompts=share) == []
