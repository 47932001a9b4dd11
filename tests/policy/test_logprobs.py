"""Tests of teacher-forced scoring against logits that are materialised row by row, without padding."""

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from grpo_pl.functional import logprobs as functional
from grpo_pl.policy import logprobs as scoring
from grpo_pl.policy.logprobs import completion_logprobs, completion_states, update_scores

SHAPE = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _llama():
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))


def _gpt2():
    config = GPT2Config(vocab_size=29, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():
        parameter.data.mul_(8.0) if parameter.ndim > 1 else None
    return model


def _gemma2():
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0))


def _cohere():
    return CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25))


PLAIN, CHANGED = [_llama, _gpt2], [_gemma2, _cohere]


def _build(builder):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return builder()


@pytest.fixture
def rollout() -> dict[str, torch.Tensor]:
    """Three rows: prompts of 3, 1 and 2 tokens on the left of 4 columns, completions of 5, 2 and 0 on the right."""
    generator = torch.Generator().manual_seed(1)
    prompt_mask = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1]]).bool()
    completion_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    return {
        "prompt_ids": torch.randint(29, (3, 4), generator=generator).masked_fill(~prompt_mask, 0),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(29, (3, 5), generator=generator).masked_fill(~completion_mask, 0),
        "completion_mask": completion_mask,
    }


def _reference(model, rollout, temperature):
    """Row by row without padding, every logit at once: logprobs and entropies of unmasked tokens, concatenated."""
    logprobs, entropies = [], []
    for row in range(3):
        prompt = rollout["prompt_ids"][row][rollout["prompt_mask"][row]]
        completion = rollout["completion_ids"][row][rollout["completion_mask"][row]]
        logits = model(torch.cat([prompt, completion]).unsqueeze(0)).logits[0] / temperature
        table = logits[len(prompt) - 1 : len(prompt) + len(completion) - 1].log_softmax(-1)
        logprobs.append(table.gather(1, completion.unsqueeze(1)).squeeze(1))
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("builder", PLAIN + CHANGED)
def test_scores_and_gradients_equal_the_materialised_form(builder, rollout, monkeypatch):
    monkeypatch.setattr(functional, "_CHUNK_TOKENS", 3)
    # Gemma and Cohere have parts that are float32 in any case
    dtype, tolerance = (torch.float64, 1e-9) if builder in PLAIN else (torch.float32, 1e-4)
    model, mask = _build(builder).to(dtype), rollout["completion_mask"]
    logprobs, entropy = completion_logprobs(model, **rollout, temperature=0.8, with_entropy=True)
    expected, expected_entropy = _reference(model, rollout, 0.8)
    torch.testing.assert_close(logprobs[mask], expected, atol=tolerance, rtol=0.0)
    torch.testing.assert_close(entropy[mask], expected_entropy, atol=tolerance, rtol=0.0)
    assert logprobs.isfinite().all() and logprobs.dtype == dtype
    slope = torch.linspace(-1, 2, len(expected), dtype=dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ours = torch.autograd.grad(((logprobs[mask] + 0.3 * entropy[mask]) * slope).sum(), parameters)
    reference = torch.autograd.grad(((expected + 0.3 * expected_entropy) * slope).sum(), parameters)
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("score", [completion_logprobs, update_scores, completion_states])
def test_an_argument_of_another_name_is_refused(score, rollout):
    options = {} if score is completion_states else {"temperature": 1.0}
    with pytest.raises(TypeError, match="actions_mask"):  # would score what the policy did not write
        score(_build(_llama), **rollout, **options, actions_mask=rollout["completion_mask"])


@pytest.mark.parametrize("builder", [_llama, _cohere])
@pytest.mark.parametrize("way", ["packed", "chunked", "materialised"])
def test_what_the_policy_did_not_write_is_read_and_not_scored(builder, way, rollout):
    if builder is _cohere and way != "materialised":
        pytest.skip("its logits are scaled")
    model, mask = _build(builder), rollout["completion_mask"]
    scoring.use_forward_mode(model, way)
    written = torch.tensor([[1, 0, 0, 1, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    logprobs, entropy = completion_logprobs(model, **rollout, action_mask=written, temperature=0.8, with_entropy=True)
    tables = _reference(model, rollout, 0.8)
    chosen = written[mask]
    for ours, expected in zip((logprobs, entropy), tables, strict=True):
        torch.testing.assert_close(ours[written], expected[chosen], atol=1e-4, rtol=0.0)
        assert not ours[~written].any()
    slope = torch.linspace(-1, 2, int(chosen.sum()))
    flat = [
        torch.cat([grad.flatten() for grad in torch.autograd.grad((values * slope).sum(), list(model.parameters()))])
        for values in (logprobs[written], tables[0][chosen])
    ]
    assert (flat[0] - flat[1]).norm() <= 1e-4 * flat[1].norm()


def test_float32_gradient_agrees_within_1e_5_by_norm(rollout):
    model, mask = _build(_llama), rollout["completion_mask"]
    ours = completion_logprobs(model, **rollout, temperature=1.0)[0][mask]
    reference, _ = _reference(model, rollout, 1.0)
    slope = torch.linspace(-1, 2, len(reference))
    flat = [
        torch.cat([grad.flatten() for grad in torch.autograd.grad((values * slope).sum(), list(model.parameters()))])
        for values in (ours, reference)
    ]
    assert (flat[0] - flat[1]).norm() <= 1e-5 * flat[1].norm()


def test_bfloat16_model_is_scored_in_float32(rollout):
    model, mask = _build(_llama).bfloat16(), rollout["completion_mask"]
    logprobs, _ = completion_logprobs(model, **rollout, temperature=1.0)
    expected, _ = _reference(model.float(), rollout, 1.0)
    assert logprobs.dtype == torch.float32
    assert (logprobs[mask] - expected).abs().max() < 0.2


@pytest.mark.parametrize(
    ("builder", "way"), [(_llama, "packed"), (_gpt2, "packed"), (_gemma2, "materialised"), (_cohere, "materialised")]
)
def test_each_model_is_scored_in_the_best_way_it_allows(builder, way):
    """Capped or scaled logits are left to the model."""
    assert scoring.forward_mode(_build(builder)) == way


def test_rounding_of_large_logits_is_no_other_way():
    """Those of SmolLM2-135M give tokens 25 nats, and packed ones that differ by 1.5e-4."""
    model = _build(_llama)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 20_000.0)
    assert scoring.forward_mode(model) == "packed"


def test_hooked_head_is_left_to_the_model(rollout):
    model = _build(_llama)
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    assert scoring.forward_mode(model) == "materialised"
    logprobs, _ = completion_logprobs(model, **rollout, temperature=1.0)
    torch.testing.assert_close(logprobs[rollout["completion_mask"]], _reference(model, rollout, 1.0)[0])


def test_attention_that_packing_does_not_know_is_padded(rollout):
    """Falcon-style ALiBi goes past transformers' attention interface: its biases would see the pack's positions."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=29, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.3)
    config.hidden_dropout = config.attention_dropout = 0.0
    model = _build(lambda: BloomForCausalLM(config))
    assert scoring.forward_mode(model) == "chunked"
    logprobs, _ = completion_logprobs(model, **rollout, temperature=1.0)
    expected, _ = _reference(model, rollout, 1.0)
    torch.testing.assert_close(logprobs[rollout["completion_mask"]], expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("window", [5, 8])
def test_sequences_longer_than_a_sliding_window_are_padded(rollout, window):
    """The longest sequence that is fed has 3 + 4 tokens."""
    model = _build(lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=window)))
    assert scoring.forward_mode(model) == "packed"
    shapes: list[torch.Size] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: shapes.append(inputs[0].shape))
    logprobs, _ = completion_logprobs(model, **rollout, temperature=1.0)
    (shape,) = shapes
    assert (shape[0] == len(rollout["prompt_ids"])) == (window < 7)  # one row each, or one row for all tokens
    expected, _ = _reference(model, rollout, 1.0)
    torch.testing.assert_close(logprobs[rollout["completion_mask"]], expected, atol=1e-5, rtol=0.0)


def test_checkpointed_activations_give_the_same_gradient(rollout):
    plain, checkpointed = _build(_llama), _build(_llama)
    checkpointed.gradient_checkpointing_enable()
    for model in (plain, checkpointed):
        completion_logprobs(model, **rollout, temperature=1.0)[0].sum().backward()
    for mine, theirs in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_model_is_left_as_it_was(rollout):
    model = _build(_llama)
    completion_logprobs(model, **rollout, temperature=1.0)
    assert "forward" not in vars(model.lm_head) and not model.lm_head._forward_hooks and model.training
    assert model.config._attn_implementation == "sdpa"
    assert model(rollout["prompt_ids"]).logits.shape == (3, 4, 29)


def test_head_is_restored_when_the_forward_fails(rollout):
    model = _build(_llama)
    with pytest.raises(IndexError):
        completion_logprobs(model, **(rollout | {"completion_ids": rollout["completion_ids"] + 1000}), temperature=1.0)
    assert "forward" not in vars(model.lm_head) and model.config._attn_implementation == "sdpa"


def test_more_padding_changes_nothing(rollout):
    model = _build(_gpt2)
    wide = {
        "prompt_ids": torch.nn.functional.pad(rollout["prompt_ids"], (3, 0)),
        "prompt_mask": torch.nn.functional.pad(rollout["prompt_mask"], (3, 0)),
        "completion_ids": torch.nn.functional.pad(rollout["completion_ids"], (0, 4)),
        "completion_mask": torch.nn.functional.pad(rollout["completion_mask"], (0, 4)),
    }
    narrow_logprobs, _ = completion_logprobs(model, **rollout, temperature=1.0)
    wide_logprobs, _ = completion_logprobs(model, **wide, temperature=1.0)
    torch.testing.assert_close(wide_logprobs[:, :5], narrow_logprobs, atol=1e-5, rtol=0.0)


def test_lora_adapters_are_scored_and_trained(rollout):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(_build(_llama), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    logprobs, _ = completion_logprobs(model, **rollout, temperature=1.0)
    torch.testing.assert_close(logprobs[rollout["completion_mask"]], _reference(model, rollout, 1.0)[0])
    logprobs.sum().backward()
    graded = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert graded and all("lora" in name for name in graded)
