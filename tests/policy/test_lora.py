"""Adapters: the policy at the start, the reference with them off, merged and unmerged exports."""

import json
import math
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

pytest.importorskip("peft", reason="LoRA needs peft: pip install 'grpo_pl[lora]'")

from peft import LoraConfig

from grpo_pl.policy.loading import PolicyConfig, declared_eos_ids, load_model, load_tokenizer, model_config
from grpo_pl.policy.lora import Lora, adapters_off, add_adapters, has_adapters, merged
from grpo_pl.policy.trained import find_model
from grpo_pl.training.frozen_models import Reference

SCRATCH: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "initializer_range": 0.3,
}
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def moved(model: PreTrainedModel, size: float = 0.3) -> PreTrainedModel:
    """With adapters that do something, as after training."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * size
    return model


@pytest.fixture
def adapted(tiny_policy: PreTrainedModel) -> PreTrainedModel:
    add_adapters(tiny_policy, Lora(rank=2, alpha=8.0), seed=3)
    return moved(tiny_policy)


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_new_adapters_change_nothing_and_are_all_that_trains(tiny_policy: PreTrainedModel) -> None:
    before = _logits(tiny_policy)
    add_adapters(tiny_policy, Lora(rank=2), seed=0)
    assert torch.equal(_logits(tiny_policy), before)
    trained = {name.rsplit(".", 3)[1] for name, weight in tiny_policy.named_parameters() if weight.requires_grad}
    assert trained == {"lora_A", "lora_B"}
    assert not any("lm_head" in name for name, w in tiny_policy.named_parameters() if w.requires_grad)


def test_the_seed_names_the_adapters(tokenizer: PreTrainedTokenizerBase) -> None:
    def first(seed: int) -> torch.Tensor:
        scratch = {**SCRATCH, "num_hidden_layers": 1}
        policy = PolicyConfig(from_scratch=scratch, lora=Lora(rank=2), init_seed=seed)
        model = load_model(policy, tokenizer)
        return next(w for name, w in model.named_parameters() if "lora_A" in name)

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


def test_named_layers_alone_get_adapters(tiny_policy: PreTrainedModel) -> None:
    add_adapters(tiny_policy, Lora(targets=["q_proj"]), seed=0)
    assert {n.split(".")[-4] for n, w in tiny_policy.named_parameters() if w.requires_grad} == {"q_proj"}


def test_a_name_that_no_layer_has_is_refused_in_one_line(tiny_policy: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"policy\.lora: .*nose_proj") as caught:
        add_adapters(tiny_policy, Lora(targets=["nose_proj"]), seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "targets", "shared"),
    [
        ({}, ["q_proj", "lm_head"], "lm_head"),
        ({}, ["embed_tokens"], "model.embed_tokens"),
        ({"model_type": "gpt2"}, ["c_attn", "wte"], "transformer.wte"),
    ],
)
def test_a_target_whose_weight_another_layer_shares_is_refused(
    tokenizer: PreTrainedTokenizerBase, family: dict[str, str], targets: list[str], shared: str
) -> None:
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 1} if family else {**SCRATCH, "num_hidden_layers": 1}
    scratch = {**sizes, **family, "tie_word_embeddings": True}
    with pytest.raises(ValueError, match=r"policy\.lora\.targets") as caught:
        load_model(PolicyConfig(from_scratch={"model_type": "qwen2", **scratch}, lora=Lora(targets=targets)), tokenizer)
    assert "\n" not in str(caught.value)
    assert shared in str(caught.value) and "tie_word_embeddings" in str(caught.value)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_untied_head_or_embedding_is_merged_into_what_it_computed(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, target: str
) -> None:
    scratch = {**SCRATCH, "num_hidden_layers": 1, "tie_word_embeddings": False}
    lora = Lora(rank=2, alpha=8.0, targets=["q_proj", target])
    model = load_model(PolicyConfig(from_scratch=scratch, lora=lora), tokenizer).eval()
    start = _logits(model)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.3
    assert (_logits(model) - start).abs().max() > 1e-2
    merged(model).save_pretrained(tmp_path)
    torch.testing.assert_close(
        _logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), _logits(model), rtol=0, atol=1e-4
    )


def test_by_default_no_layer_with_a_shared_weight_gets_an_adapter(tiny_policy: PreTrainedModel) -> None:
    first = tiny_policy.model.layers[0].self_attn
    first.k_proj.weight = first.v_proj.weight
    add_adapters(tiny_policy, Lora(rank=2), seed=0)
    adapted = {name.rpartition(".")[2] for name, module in tiny_policy.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("targets", [["q_proj", "qproj"], ["nose_proj", "q_proj"], ["q_proj", "mlp.v_proj"]])
def test_a_misspelt_target_beside_right_ones_is_refused(tiny_policy: PreTrainedModel, targets: list[str]) -> None:
    wrong = next(target for target in targets if target != "q_proj")
    with pytest.raises(ValueError, match=rf"policy\.lora\.targets: .*{re.escape(wrong)}") as caught:
        add_adapters(tiny_policy, Lora(targets=targets), seed=0)
    assert "\n" not in str(caught.value)


def test_targets_may_name_experts_as_their_checkpoints_do(tokenizer: PreTrainedTokenizerBase) -> None:
    scratch = {**SCRATCH, "model_type": "mixtral", **FAMILIES["mixtral"]}
    load_model(PolicyConfig(from_scratch=scratch, lora=Lora(rank=2, targets=["q_proj", "w1", "w3"])), tokenizer)
    with pytest.raises(ValueError, match="gate_up_proj"):  # the name of no layer
        load_model(PolicyConfig(from_scratch=scratch, lora=Lora(targets=["q_proj", "gate_up_proj"])), tokenizer)


def test_the_reference_is_the_policy_with_its_adapters_off(adapted: PreTrainedModel) -> None:
    reference = Reference(adapted, update_every=None)
    assert reference.model is adapted
    with_adapters = _logits(adapted)
    with adapters_off(reference.model):
        start = _logits(adapted)
    assert not torch.allclose(start, with_adapters, atol=1e-3)
    assert torch.equal(_logits(adapted), with_adapters)
    assert all(w.requires_grad for name, w in adapted.named_parameters() if "lora_" in name)
    base = {k.replace(".base_layer", ""): v for k, v in adapted.state_dict().items() if "lora_" not in k}
    plain = AutoModelForCausalLM.from_config(adapted.config)
    plain.load_state_dict(base)
    torch.testing.assert_close(_logits(plain), start, rtol=0, atol=1e-6)


def test_a_renewed_reference_and_adapters_exclude_each_other(adapted: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"which policy\.lora does without"):
        Reference(adapted, update_every=2)


def test_merged_weights_are_w_plus_scaled_b_a_and_compute_the_same(adapted: PreTrainedModel) -> None:
    copy = merged(adapted)
    assert not has_adapters(copy) and has_adapters(adapted)
    torch.testing.assert_close(_logits(copy.eval()), _logits(adapted.eval()), rtol=0, atol=1e-5)
    layer = adapted.model.layers[0].mlp.up_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = layer.base_layer.weight + (8.0 / 2) * b @ a
    torch.testing.assert_close(copy.model.layers[0].mlp.up_proj.weight, expected)


def test_a_run_with_adapters_keeps_the_base_and_exports_both_ways(command_line: Any, tmp_path: Path) -> None:
    from grpo_pl.cli.main import main

    policy = PolicyConfig(from_scratch={**SCRATCH, "num_hidden_layers": 1})
    tokenizer = load_tokenizer(policy)
    tokenizer.save_pretrained(tmp_path / "base")
    base = load_model(policy, tokenizer)
    base.save_pretrained(tmp_path / "base")
    config = command_line.config(
        "adapted",
        model__policy={"path": str(tmp_path / "base"), "lora": {"rank": 2, "alpha": 4.0}},
        model__cold_start=None,
        model__algorithm={"group_size": 4, "beta": 0.1},
        model__rewards=[
            {"class_path": "user_parts.Listening", "init_args": {"correctness": True}},
        ],
        data__steps=3,
    )
    command_line.done("fit", "--config", config, "--trainer.limit_val_batches=0")
    run = command_line.runs / "adapted"
    merged_model = AutoModelForCausalLM.from_pretrained(run / "export")
    assert not has_adapters(merged_model)
    moved = [n for n, w in merged_model.named_parameters() if not torch.equal(w, base.get_parameter(n))]
    assert moved and all("proj" in name for name in moved)

    assert main(["export", str(run / "checkpoints" / "last.ckpt"), str(tmp_path / "merged")]) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(_logits(again), _logits(merged_model), rtol=0, atol=1e-6)

    assert main(["export", str(run), str(tmp_path / "unmerged"), "--merge=false"]) == 0
    assert not (tmp_path / "unmerged" / "model.safetensors").exists()
    both = AutoModelForCausalLM.from_pretrained(tmp_path / "unmerged")
    assert has_adapters(both)
    torch.testing.assert_close(_logits(both), _logits(merged_model), rtol=0, atol=1e-5)

    unmerged, whole = tmp_path / "unmerged", tmp_path / "merged"
    found = find_model(unmerged, trust_rewards=True)
    served = found.load_policy("cpu")
    assert found.context == SCRATCH["max_position_embeddings"] and not has_adapters(served)
    assert all(torch.equal(weight, again.get_parameter(name)) for name, weight in served.named_parameters())
    texts = []
    for folder in (unmerged, whole):
        file, given = tmp_path / f"{folder.name}.jsonl", ("--trust_rewards=true", "--device=cpu")
        command_line.done(
            "predict", f"--model={folder}", f"--output={file}", "--prompts=3", "--samples=2", "--config", config, *given
        )
        texts.append(file.read_text())
    assert texts[0] == texts[1] != ""
    problem = tmp_path / "problems.jsonl"
    problem.write_text('{"problem": "3 + 4", "answer": "7"}\n')
    command_line(
        "evaluate", f"--data={problem}", f"--model={unmerged}", "--n=2", f"--output={tmp_path / 'e.jsonl'}", *given
    )
    assert (tmp_path / "e.jsonl").is_file()

    on_top = command_line.config(
        "on_top", model__policy={"path": str(unmerged), "lora": {"rank": 2}}, model__cold_start=None, data__steps=1
    )
    command_line.done("fit", "--config", on_top, "--trainer.limit_val_batches=0")
    assert main(["export", str(command_line.runs / "on_top"), str(tmp_path / "second"), "--merge=false"]) == 1

    with (run / "metrics.csv").open() as file:
        header, *rows = (line.rstrip("\n").split(",") for line in file)
    kl = [float(row[header.index("kl")]) for row in rows]
    assert kl[0] == 0.0 and kl[-1] > 0.0 and all(map(math.isfinite, kl))


_EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 2}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**_EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24},
    "olmoe": {**_EXPERTS, "num_experts": 4},
    "gpt_oss": {**_EXPERTS, "num_local_experts": 4, "head_dim": 16},
    "granitemoe": {**_EXPERTS, "num_local_experts": 4},
    "deepseek_v3": {
        **(_EXPERTS | _LATENT),
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "phimoe": {**_EXPERTS, "num_local_experts": 4},  # its router returns more than a product
    "jamba": {  # reads the weight of one linear layer without calling it
        **_EXPERTS,
        "num_experts": 4,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
    },
}
"""Models whose experts are one 3-D parameter, and others with layers that are no plain linear ones."""


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_every_family_are_merged_into_what_they_computed(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, family: str
) -> None:
    scratch = {**SCRATCH, "model_type": family, **FAMILIES[family]}
    if family == "jamba":
        del scratch["max_position_embeddings"]
    start = load_model(PolicyConfig(from_scratch=scratch), tokenizer).eval()
    model = load_model(PolicyConfig(from_scratch=scratch, lora=Lora(rank=2, alpha=8.0)), tokenizer).eval()
    torch.testing.assert_close(_logits(model), _logits(start), rtol=0, atol=1e-5)
    moved(model)
    assert (_logits(model) - _logits(start)).abs().max() > 1e-2
    with adapters_off(model):
        torch.testing.assert_close(_logits(model), _logits(start), rtol=0, atol=1e-5)
    merged(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(_logits(loaded), _logits(model), rtol=0, atol=1e-4)


def test_a_router_that_is_named_as_a_target_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    scratch = {**SCRATCH, "model_type": "phimoe", **FAMILIES["phimoe"]}
    with pytest.raises(ValueError, match=r"policy\.lora\.targets: model\.layers\.0\.mlp\.router of PhimoeForCausalLM"):
        load_model(PolicyConfig(from_scratch=scratch, lora=Lora(targets=["q_proj", "router"])), tokenizer)


def test_a_run_of_fused_experts_is_trained_exported_and_loaded(command_line: Any) -> None:
    from grpo_pl.files.checkpoints import policy_weights
    from grpo_pl.files.sharded_checkpoints import read_checkpoint

    scratch = {**SCRATCH, "model_type": "mixtral", **FAMILIES["mixtral"]}
    policy = {"from_scratch": scratch, "lora": {"rank": 2, "alpha": 8.0}}
    rewards = [
        {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}},
        {"class_path": "user_parts.Listening"},  # its rewards differ, so that weights move
    ]
    changes = {"model__policy": policy, "model__rewards": rewards, "model__cold_start": None, "data__steps": 2}
    config = command_line.config("experts", **changes, trainer={"accelerator": "cpu", "limit_val_batches": 0})
    command_line.done("fit", "--config", config)
    run = command_line.runs / "experts"
    trained = PolicyConfig(**policy)
    model = load_model(trained, load_tokenizer(trained), weights=False).eval()
    model.load_state_dict(policy_weights(read_checkpoint(run / "checkpoints" / "last.ckpt")))
    assert any(weight.abs().max() > 0 for name, weight in model.named_parameters() if "experts.lora_B" in name)
    exported = AutoModelForCausalLM.from_pretrained(run / "export").eval()
    torch.testing.assert_close(_logits(exported), _logits(model), rtol=0, atol=1e-5)


def test_a_folder_of_adapters_is_merged_in_the_precision_of_what_was_learned(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    scratch = {**SCRATCH, "num_hidden_layers": 1}
    base = load_model(PolicyConfig(from_scratch=scratch, dtype="bfloat16"), tokenizer)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    policy = PolicyConfig(path=str(tmp_path / "base"), lora=Lora(rank=2))
    trained = moved(load_model(policy, tokenizer), 1e-3)
    trained.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    trained.save_pretrained(tmp_path / "adapters")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    loaded = load_model(PolicyConfig(path=str(tmp_path / "adapters"), dtype="auto"), tokenizer)
    assert torch.equal(torch.rand(3), expected)
    torch.testing.assert_close(_logits(loaded), _logits(trained), rtol=0, atol=1e-5)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_adapters_take_tokenizer_and_end_tokens_of_their_base(
    tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, file: str, with_tokenizer: bool
) -> None:
    base, folder, end = tmp_path / "base", tmp_path / "adapters", tokenizer.convert_tokens_to_ids("$")
    tiny_policy.save_pretrained(base)
    without = deepcopy(tokenizer)
    without.eos_token = None
    without.save_pretrained(base)
    (base / file).write_text(json.dumps({**json.loads((base / file).read_text()), "eos_token_id": end}))
    if file == "config.json":
        (base / "generation_config.json").unlink()
    tiny_policy.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    tiny_policy.peft_config["default"].base_model_name_or_path = str(base)
    tiny_policy.save_pretrained(folder)
    (folder / "generation_config.json").unlink()  # peft itself writes none
    if with_tokenizer:
        without.save_pretrained(folder)
    policy = PolicyConfig(path=str(folder))
    assert declared_eos_ids(str(folder)) == [end] and load_tokenizer(policy).eos_token == "$"
    for weights in (False, True):
        loaded = load_model(policy, tokenizer, weights=weights)
        assert loaded.generation_config.eos_token_id == end


def test_a_folder_with_a_tokenizer_alone_names_no_end_tokens(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    assert declared_eos_ids(str(tmp_path)) == []


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_of_a_tied_head_or_embedding_are_not_merged(
    tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, target: str
) -> None:
    tiny_policy.save_pretrained(tmp_path / "base")
    tiny_policy.add_adapter(LoraConfig(r=2, target_modules=["q_proj", target], init_lora_weights=False))
    tiny_policy.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    tiny_policy.save_pretrained(tmp_path / "adapters")
    with pytest.raises(ValueError, match=rf"{target} .*tie_word_embeddings") as caught:
        load_model(PolicyConfig(path=str(tmp_path / "adapters")), tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"base_model_name_or_path": None}, "base_model_name_or_path"),
        ({"base_model_name_or_path": "/nowhere/base"}, "/nowhere/base"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
    ],
)
def test_adapters_that_cannot_be_merged_end_in_one_line(
    adapted: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    adapted.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "other", **change}))
    for load in (model_config, load_model):
        with pytest.raises(ValueError, match=named) as caught:
            load(PolicyConfig(path=str(tmp_path)), tokenizer)
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
