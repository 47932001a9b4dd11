"""Each private part of a library that is used still exists and still does what it is used for."""

import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from torch.distributed import checkpoint
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.utils import import_utils

from grpo_pl.policy.library_internals import (
    attends_by_interface,
    attention_by,
    changes_more_than_weights,
    has_hooks,
    import_models,
    is_adapted,
    unmerged_adapters,
    unwrap,
    without_prefix,
)


@pytest.fixture
def model() -> LlamaForCausalLM:
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=11, tie_word_embeddings=True, attention_bias=True, **shape)
    return LlamaForCausalLM(config)


def test_a_registered_attention_is_called_inside_only(model: LlamaForCausalLM) -> None:
    calls = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        calls.append(query.shape)
        return query.transpose(1, 2), None

    AttentionInterface.register("test_library_internals", attend)
    ids = torch.tensor([[1, 2, 3]])
    before = model(ids).logits
    with pytest.raises(ZeroDivisionError), attention_by(model, "test_library_internals"):
        model(ids)
        raise ZeroDivisionError
    assert len(calls) == 1
    assert torch.equal(model(ids).logits, before)
    assert len(calls) == 1


def test_models_say_whether_they_attend_through_the_interface(model: LlamaForCausalLM) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    bloom = BloomForCausalLM(BloomConfig(vocab_size=11, hidden_size=8, n_layer=1, n_head=2))
    assert attends_by_interface(model)
    assert not attends_by_interface(bloom)


def test_hooks_of_both_kinds_are_seen() -> None:
    plain, before, after = (torch.nn.Linear(2, 2) for _ in range(3))
    before.register_forward_pre_hook(lambda module, inputs: None)
    after.register_forward_hook(lambda module, inputs, output: None)
    assert [has_hooks(module) for module in (plain, before, after)] == [False, True, True]


def test_wrappers_come_off(model: LlamaForCausalLM) -> None:
    assert unwrap(model) is model
    assert unwrap(torch.compile(model)) is model
    assert unwrap(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))) is model


@pytest.mark.parametrize(
    ("options", "more"), [({}, False), ({"use_dora": True}, True), ({"lora_bias": True}, True)], ids=str
)
def test_adapters_are_found_and_known(model: LlamaForCausalLM, options: dict, more: bool) -> None:
    linear = torch.nn.Linear(2, 2)
    assert not is_adapted(linear) and unmerged_adapters(linear) == []
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], **options))
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    assert is_adapted(layer)
    assert unmerged_adapters(layer) == ["default"]
    assert changes_more_than_weights(layer) == more
    layer.enable_adapters(False)
    assert unmerged_adapters(layer) == []
    layer.enable_adapters(True)
    layer.merge()
    assert unmerged_adapters(layer) == []


def test_what_sharded_checkpoints_use_is_there() -> None:
    from torch.distributed.checkpoint import default_planner, filesystem, metadata, state_dict_loader

    assert callable(state_dict_loader._load_state_dict)
    assert issubclass(default_planner._EmptyStateDictLoadPlanner, checkpoint.LoadPlanner)
    assert issubclass(filesystem.FileSystem, filesystem.FileSystemBase)
    assert {"storage_meta", "state_dict_metadata"} <= metadata.Metadata.__dataclass_fields__.keys()
    assert callable(checkpoint.FileSystemReader._get_metadata_path)


def test_the_list_of_models_without_a_prefix_is_what_transformers_reads_itself() -> None:
    """In a process of its own, since the list is made at the first import."""
    code = """if True:
        from grpo_pl.policy.library_internals import import_models
        from transformers.utils import import_utils

        read_folders, asked = import_utils.create_import_structure_from_path, []
        import_utils.create_import_structure_from_path = lambda path: asked.append(path) or read_folders(path)
        before = import_utils.define_import_structure
        import_models()
        assert import_utils.define_import_structure is before and not asked, asked
        from transformers import Qwen2Config
        from transformers.models import qwen2
        assert qwen2.Qwen2Config is Qwen2Config
    """
    subprocess.run([sys.executable, "-c", code], check=True)
    import_models()  # again, which changes nothing
    folder = Path(str(import_utils.__file__)).parents[1] / "models"
    own = import_utils.define_import_structure(str(folder / "__init__.py"))
    assert own == without_prefix(import_utils.define_import_structure(folder, prefix="models"), "models.")
    assert any("qwen2.modeling_qwen2" in modules for modules in own.values())
