"""A policy from scratch, from a folder, and from nowhere."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.policy.loading import (
    PolicyConfig,
    context_length,
    end_token_ids,
    eos_ids,
    load_model,
    load_tokenizer,
    model_config,
)
from grpo_pl.policy.lora import Lora
from grpo_pl.policy.tokenizer import end_of_text
from grpo_pl.types import SamplingParams

SCRATCH: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


@pytest.fixture
def saved(tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    tiny_policy.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def _weights(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def test_a_policy_from_scratch_speaks_the_character_tokenizer() -> None:
    policy = PolicyConfig(from_scratch=SCRATCH)
    tokenizer = load_tokenizer(policy)
    model = load_model(policy, tokenizer)
    assert model.config.model_type == "llama"
    assert model.get_input_embeddings().weight.shape == (len(tokenizer), 16)
    assert eos_ids(model, tokenizer) == [tokenizer.eos_token_id]
    assert context_length(model.config) == 32
    assert model.training


def test_weights_from_scratch_follow_init_seed_and_leave_the_global_generator_alone() -> None:
    def build(seed: int) -> torch.Tensor:
        policy = PolicyConfig(from_scratch=SCRATCH, init_seed=seed)
        return _weights(load_model(policy, load_tokenizer(policy)))

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = build(0)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, build(0))
    assert not torch.equal(first, build(1))


def test_a_folder_gives_back_weights_and_tokenizer(saved: Path, tiny_policy: PreTrainedModel) -> None:
    policy = PolicyConfig(path=str(saved))
    tokenizer = load_tokenizer(policy)
    loaded = load_model(policy, tokenizer)
    assert torch.equal(_weights(loaded), _weights(tiny_policy))
    assert loaded.training  # from_pretrained alone leaves it in eval mode
    assert tokenizer.padding_side == "left"


def test_without_weights_only_the_architecture_is_built(saved: Path, tiny_policy: PreTrainedModel) -> None:
    policy = PolicyConfig(path=str(saved), init_seed=1)
    empty = load_model(policy, load_tokenizer(policy), weights=False)
    assert empty.config.hidden_size == tiny_policy.config.hidden_size
    assert not torch.equal(_weights(empty), _weights(tiny_policy))


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_dtype_is_that_of_the_weights(saved: Path, dtype: Any, expected: torch.dtype) -> None:
    for policy in (PolicyConfig(from_scratch=SCRATCH, dtype=dtype), PolicyConfig(path=str(saved), dtype=dtype)):
        assert {p.dtype for p in load_model(policy, load_tokenizer(policy)).parameters()} == {expected}


def test_dropout_is_off_so_that_two_forwards_in_training_mode_agree(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    assert config.resid_pdrop > 0
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer, ids = load_tokenizer(PolicyConfig(from_scratch=SCRATCH)), torch.tensor([[1, 2, 3, 4]])
    of_attention = PolicyConfig(from_scratch={**SCRATCH, "attention_dropout": 0.5})
    for policy in (PolicyConfig(path=str(tmp_path)), of_attention):
        model = load_model(policy, tokenizer)
        assert model.training and torch.equal(model(ids).logits, model(ids).logits)


def test_a_tokenizer_without_padding_pads_with_eos(saved: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    without = load_tokenizer(PolicyConfig(path=str(saved)))
    without.pad_token = None
    without.save_pretrained(saved)
    assert load_tokenizer(PolicyConfig(path=str(saved))).pad_token_id == tokenizer.eos_token_id


def test_every_declared_end_counts(tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    tiny_policy.generation_config.eos_token_id = [7, 5]
    assert eos_ids(tiny_policy, tokenizer) == sorted({5, 7, tokenizer.eos_token_id})
    sampling = SamplingParams(stop_token_ids=(9, 5))
    assert end_token_ids(tiny_policy, tokenizer, sampling) == sorted({5, 7, 9, tokenizer.eos_token_id})


@pytest.mark.parametrize("load", [load_tokenizer, lambda policy: load_model(policy, None)])
def test_a_policy_that_is_nowhere_is_one_clear_line(load: Any, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(ValueError, match="cannot load the") as caught:
        load(PolicyConfig(path=missing))
    assert missing in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json, so no model"):
        load_tokenizer(PolicyConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="that folder") as caught:
        load_model(PolicyConfig(path=str(tmp_path)), None)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="is a file; give the model's folder"):
        load_tokenizer(PolicyConfig(path=str(tmp_path / "config.json")))


def test_exactly_one_of_path_and_from_scratch() -> None:
    for arguments in ({}, {"path": "x", "from_scratch": SCRATCH}):
        with pytest.raises(ValueError, match="exactly one of `path`"):
            PolicyConfig(**arguments)


def test_what_fsdp2_cannot_shard_is_refused() -> None:
    scratch = {"model_type": "qwen2"}
    for policy in (PolicyConfig(from_scratch=scratch), PolicyConfig(from_scratch=scratch, images=True)):
        policy.check_sharding()
    packed = PolicyConfig(path="somewhere", lora=Lora(rank=1), quantization="nf4")
    with pytest.raises(ValueError, match=r"^policy\.quantization .*FSDP2"):
        packed.check_sharding()


def test_from_scratch_wants_a_model_type_that_transformers_knows(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="needs a `model_type`"):
        PolicyConfig(from_scratch={"hidden_size": 4})
    with pytest.raises(ValueError, match=r"transformers refuses 'qwem2': Unrecognized model identifier: qwem2$"):
        load_model(PolicyConfig(from_scratch={"model_type": "qwem2"}), tokenizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hiden_size": 8}, "llama has no setting 'hiden_size'; did you mean hidden_size?"),
        ({"hidden_size": "8"}, "expected int, got str"),
        ({"num_attention_heads": 0}, "transformers refuses 'llama': integer division or modulo by zero"),
        (
            {"model_type": "qwen2", "hidden_size": 9, "num_attention_heads": 2},
            "hidden_size 9 with 2 heads of 4.5, which",
        ),
        ({"model_type": "qwen2", "hidden_size": 10, "num_attention_heads": 2}, "2 heads of 5, which share 1 of keys"),
        (
            {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 2},
            "3 heads of 4, which share 2 of keys and values: a head must have an even number of dimensions",
        ),
        ({"num_key_value_heads": 0}, "no llama model can be built from this config: ZeroDivisionError"),
    ],
)
def test_a_setting_from_scratch_that_cannot_be_meant_is_refused(
    settings: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(PolicyConfig(from_scratch={**SCRATCH, **settings}), tokenizer)


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_a_saved_from_scratch_model_keeps_its_spaces_and_newlines(model_type: str, tmp_path: Path) -> None:
    policy = PolicyConfig(from_scratch={**SCRATCH, "model_type": model_type})
    tokenizer = load_tokenizer(policy)
    load_model(policy, tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(PolicyConfig(path=str(tmp_path)))
    text = "1 + 2 =\n3"
    assert loaded(text).input_ids == tokenizer(text).input_ids
    assert loaded.decode(loaded(text).input_ids) == text


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_tokenizer_without_eos_takes_the_one_that_the_model_names(
    saved: Path, tokenizer: PreTrainedTokenizerBase, file: str
) -> None:
    without = load_tokenizer(PolicyConfig(path=str(saved)))
    without.eos_token = None
    without.save_pretrained(saved)
    (saved / "generation_config.json").unlink()
    for name in {file, "config.json"}:
        settings = json.loads((saved / name).read_text()) if (saved / name).is_file() else {}
        ends = [10**6, tokenizer.convert_tokens_to_ids("$")] if name == file else None
        (saved / name).write_text(json.dumps({**settings, "eos_token_id": ends}))
    loaded = load_tokenizer(PolicyConfig(path=str(saved)))
    assert loaded.eos_token == "$" and end_of_text(loaded) == [loaded.convert_tokens_to_ids("$")]
    loaded.save_pretrained(saved / "again")
    assert load_tokenizer(PolicyConfig(path=str(saved / "again"))).eos_token == "$"


def test_a_model_that_names_no_end_token_has_none(saved: Path) -> None:
    without = load_tokenizer(PolicyConfig(path=str(saved)))
    without.eos_token = None
    without.save_pretrained(saved)
    for name in ("generation_config.json", "config.json"):
        (saved / name).write_text(json.dumps({**json.loads((saved / name).read_text()), "eos_token_id": None}))
    assert end_of_text(load_tokenizer(PolicyConfig(path=str(saved)))) == []


TEXT = {**SCRATCH, "num_hidden_layers": 2, "head_dim": 8, "max_position_embeddings": 40}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
COMPOSITE: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": {**VISION, "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4},
    "llama4": {},
    "qwen3_5": {},
}
"""Models of several parts, whose config says nothing of the text itself."""


@pytest.mark.parametrize("family", COMPOSITE)
def test_a_config_of_several_models_is_read_where_it_speaks_of_text(family: str) -> None:
    inner = {name: value for name, value in TEXT.items() if name != "model_type"}
    policy = PolicyConfig(from_scratch={"model_type": family, "text_config": inner, **COMPOSITE[family]})
    tokenizer = load_tokenizer(policy)
    config = model_config(policy, tokenizer)
    assert not hasattr(config, "vocab_size") and not hasattr(config, "max_position_embeddings")
    assert config.get_text_config().vocab_size == len(tokenizer)
    assert context_length(config) == 40
    odd = {"model_type": family, "text_config": {**inner, "num_key_value_heads": 3}, **COMPOSITE[family]}
    with pytest.raises(ValueError, match="num_key_value_heads"):
        model_config(PolicyConfig(from_scratch=odd), tokenizer)
