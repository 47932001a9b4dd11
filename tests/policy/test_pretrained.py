"""Models in folders: loaded whole or refused by name, and folders whose files are broken."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from grpo_pl.policy import pretrained
from grpo_pl.policy.pretrained import (
    MANIFEST,
    check_folder,
    check_pretrained,
    load_pretrained,
    offline_without_network,
)

CONFIGS = Path(__file__).parents[2] / "configs"
EMBEDDING = "model.embed_tokens.weight"
LAYER = "model.layers.0.self_attn.q_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def saved(tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    tiny_policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def change(folder: Path, changed: Callable[[Tensors], Any], name: str = "model.safetensors") -> None:
    tensors = load_file(folder / name)
    changed(tensors)
    save_file(tensors, folder / name, {"format": "pt"})


def refusal(folder: Path, kind: Any = AutoModelForCausalLM, head: str = "") -> str:
    """The one line with which both the check and the load refuse a folder."""
    found = []
    for refuse in (check_pretrained, load_pretrained):
        with pytest.raises(ValueError) as caught:
            refuse(kind, str(folder), head=head)
        found.append(str(caught.value))
    assert found[0] == found[1] and "\n" not in found[0]
    return found[0]


def test_what_was_saved_is_loaded_without_a_word(
    saved: Path, tiny_policy: PreTrainedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check_pretrained(AutoModelForCausalLM, str(saved))
        model = load_pretrained(AutoModelForCausalLM, str(saved))
    for name, weight in tiny_policy.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight)
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


def test_a_missing_tensor_is_named(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change(saved, lambda tensors: tensors.pop(LAYER))
    assert refusal(saved) == (
        f"cannot load the model '{saved}': its files are not those of a Qwen2ForCausalLM: {LAYER} is missing."
    )
    assert "MISSING" not in "".join(capfd.readouterr())  # transformers' table


OTHER = {"model_type": "gpt2", "vocab_size": 99, "n_embd": 32, "n_layer": 1, "n_head": 2}


@pytest.mark.parametrize(
    ("changed", "settings", "reason"),
    [
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            {},
            r"norm\.weight is \[3\] and should be \[32\]\.",
        ),
        (lambda t: t.pop(EMBEDDING), {}, f"lm_head.weight, {EMBEDDING} are missing"),  # tied, and neither is there
        (lambda t: None, {"tie_word_embeddings": False}, "lm_head.weight is missing"),
        (lambda t: None, OTHER, r"GPT2LMHeadModel: lm_head\.weight, \S+, \S+ and 14 more tensors are missing"),
        (lambda t: None, {"hidden_size": 1 << 20, "intermediate_size": 1 << 22}, "should be"),  # no memory holds it
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    saved: Path, changed: Callable[[Tensors], Any], settings: dict[str, Any], reason: str
) -> None:
    names = set(load_file(saved / "model.safetensors"))
    assert "lm_head.weight" not in names and not any("rotary" in name for name in names)  # tied, and a passing buffer
    change(saved, changed)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, **settings}))
    assert re.search(reason, refusal(saved))


@pytest.mark.parametrize("ours", [True, False])
def test_an_unexpected_tensor_is_refused_in_an_export_and_named_in_another_folder(saved: Path, ours: bool) -> None:
    change(saved, lambda tensors: tensors.update({"model.layers.7.extra": torch.zeros(2)}))
    if ours:
        (saved / MANIFEST).write_text("{}")
        assert "model.layers.7.extra is not part of the model." in refusal(saved)
        return
    with pytest.warns(UserWarning, match=r"model\.layers\.7\.extra is in its files, but not part") as told:
        load_pretrained(AutoModelForCausalLM, str(saved))
    assert len(told) == 1


def test_parts_of_an_index_must_be_there_and_whole(tiny_policy: PreTrainedModel, tmp_path: Path) -> None:
    tiny_policy.save_pretrained(tmp_path, max_shard_size="10KB")
    load_pretrained(AutoModelForCausalLM, str(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    parts = json.loads(index.read_text())["weight_map"]
    change(tmp_path, lambda tensors: tensors.pop(LAYER), parts[LAYER])
    assert f"{LAYER} is missing" in refusal(tmp_path)
    (tmp_path / parts[LAYER]).unlink()
    assert f"{tmp_path / parts[LAYER]} is missing, which model.safetensors.index.json names" in refusal(tmp_path)
    index.write_text('{"weight_map": 5}')
    assert "has no weight_map" in refusal(tmp_path)


def test_experts_that_are_fused_while_they_are_loaded_are_looked_for_as_well(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, tie_word_embeddings=False,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    load_pretrained(AutoModelForCausalLM, str(tmp_path))
    experts = [name for name in load_file(tmp_path / "model.safetensors") if ".experts.1." in name]
    change(tmp_path, lambda tensors: tensors.pop(experts[0]))
    assert "experts" in refusal(tmp_path)


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapters(saved: Path, tmp_path: Path) -> Path:
    """A folder of adapters beside the name of their base."""
    pytest.importorskip("peft")
    from peft import LoraConfig

    model = Qwen2ForCausalLM.from_pretrained(saved)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.peft_config["default"].base_model_name_or_path = str(saved)
    model.save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


def test_adapters_must_be_whole_and_no_others(adapters: Path) -> None:
    load_pretrained(AutoModelForCausalLM, str(adapters))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    whole = load_file(adapters / "adapter_model.safetensors")
    change(adapters, lambda tensors: tensors.pop(name), "adapter_model.safetensors")
    assert "q_proj.lora_A.default.weight is missing" in refusal(adapters)
    save_file({**whole, name: torch.zeros(3, 32)}, adapters / "adapter_model.safetensors", {"format": "pt"})
    assert "q_proj.lora_A.default.weight is [3, 32] and should be [2, 32]" in refusal(adapters)
    save_file({**whole, "further": torch.zeros(1)}, adapters / "adapter_model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="further is in its files"):
        load_pretrained(AutoModelForCausalLM, str(adapters))
    (adapters / MANIFEST).write_text("{}")
    (adapters / "generation_config.json").write_text("{}")
    assert "further is not part of the model" in refusal(adapters)


def test_the_base_of_adapters_must_be_whole(adapters: Path, saved: Path) -> None:
    change(saved, lambda tensors: tensors.pop(LAYER))
    assert f"cannot load the model '{saved}'" in refusal(adapters)


# --- the one exemption ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_the_head_that_a_causal_model_gets_may_be_new_and_is_the_same_each_time(saved: Path, kind: Any) -> None:
    heads = []
    for _ in range(2):
        before = torch.get_rng_state()
        with pytest.warns(UserWarning, match=r"is a causal language model: score\.(weight|bias).* new and random"):
            heads.append(load_pretrained(kind, str(saved), head="score").score.weight)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*heads) and heads[0].std() > 0
    assert "score." in refusal(saved, kind)  # which the caller has to name
    change(saved, lambda tensors: tensors.pop(LAYER))
    assert f": {LAYER} is missing." in refusal(saved, kind, head="score")


def test_a_classifier_that_has_lost_its_head_is_refused(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path)
    load_pretrained(AutoModelForSequenceClassification, str(tmp_path), head="score")
    change(tmp_path, lambda tensors: tensors.pop("score.weight"))
    assert "score.weight is missing" in refusal(tmp_path, AutoModelForSequenceClassification, head="score")


def test_without_accelerate_the_check_loads_the_model(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "_NOWHERE", {})
    check_pretrained(AutoModelForCausalLM, str(saved))
    change(saved, lambda tensors: tensors.pop(LAYER))
    assert f"{LAYER} is missing" in refusal(saved)


# --- broken files -----------------------------------------------------------------------------------------------------

SMALL = ["config.json", "generation_config.json", "tokenizer_config.json", MANIFEST]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    ("content", "reason"),
    [("", "is not JSON"), ("{", "is not JSON"), ("[]", "no(t a)? JSON object"), ("\xff", "UTF-8")],
)
def test_a_small_file_must_be_a_json_object(saved: Path, name: str, content: str, reason: str) -> None:
    (saved / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=f"{re.escape(str(saved / name))}.*{reason}"):
        check_folder(saved)


@pytest.mark.parametrize("name", [*SMALL, "tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_what_is_no_file_is_said(saved: Path, name: str) -> None:
    file = saved / name
    file.unlink(missing_ok=True)
    file.symlink_to("nowhere")
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} is a link to nowhere, which is missing"):
        check_folder(saved)
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} is a folder; a file belongs there"):
        check_folder(saved)
    file.rmdir()
    os.mkfifo(file)
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} is no regular file"):
        check_folder(saved)


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x08\0\0\0\0\0\0\0{}      ", None]
)
def test_a_truncated_file_of_weights_is_named(saved: Path, content: bytes | None) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    if content is not None and content.endswith(b"{}      "):
        assert "missing" in refusal(saved)  # a whole file that holds nothing
        return
    with pytest.raises(ValueError, match=f"{re.escape(str(file))} cannot be loaded: it is truncated"):
        check_folder(saved)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"eos_token_id": "1"}, "eos_token_id must be the number of a token, got '1'"),
        ({"eos_token_id": [1, None]}, r"eos_token_id must be the number of a token, got \[1, None\]"),
        ({"pad_token_id": 1.5}, "pad_token_id must be the number of a token, got 1.5"),
        ({"pad_token_id": [0]}, r"pad_token_id must be the number of a token, got \[0\]"),
    ],
)
def test_settings_of_generation_must_mean_something(saved: Path, settings: dict[str, Any], reason: str) -> None:
    (saved / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=rf"generation_config\.json: {reason}"):
        check_folder(saved)


def test_an_export_without_its_settings_of_generation_is_refused(saved: Path) -> None:
    (saved / MANIFEST).write_text("{}")
    load_pretrained(AutoModelForCausalLM, str(saved))
    (saved / "generation_config.json").unlink()
    assert "generation_config.json is missing" in refusal(saved)


def test_a_whole_folder_passes(saved: Path, tmp_path: Path) -> None:
    check_folder(saved)
    linked = tmp_path / "linked"  # as in the hub's cache
    linked.mkdir()
    for file in saved.iterdir():
        (linked / file.name).symlink_to(file)
    check_folder(linked)
    check_pretrained(AutoModelForCausalLM, str(linked))
    shutil.rmtree(linked)


@pytest.mark.slow
def test_a_name_of_the_hub_is_refused_within_seconds() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": "https://hub.invalid", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
    command = [sys.executable, "-m", "grpo_pl", "plan", "--config", CONFIGS / "gsm8k.yaml"]
    begun = time.monotonic()
    done = subprocess.run(
        [*command, "--model.policy.path=no/such"], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1 and time.monotonic() - begun < 40  # by themselves the libraries try for 50 seconds
    assert "'no/such' (no such folder here, and the hub cannot be reached)" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_hub_that_takes_no_connection_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:
        port = hub.getsockname()[1]
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        for name in ("https_proxy", "HTTPS_PROXY"):
            monkeypatch.delenv(name, raising=False)
        offline_without_network.cache_clear()
        assert not offline_without_network()
    offline_without_network.cache_clear()
    assert offline_without_network() and constants.HF_HUB_OFFLINE
    offline_without_network.cache_clear()


def test_behind_a_proxy_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    offline_without_network.cache_clear()
    assert not offline_without_network() and not constants.HF_HUB_OFFLINE
    offline_without_network.cache_clear()


@pytest.mark.parametrize(
    ("kind", "options", "saving"),
    [
        ("tied", {}, {}),
        ("apart", {"dtype": "auto"}, {"max_shard_size": "20KB"}),
        ("apart", {"dtype": torch.bfloat16}, {}),
        ("head", {}, {}),
        ("adapter", {}, {}),
    ],
)
def test_a_loaded_model_stays_as_it_is_whatever_becomes_of_its_files(
    kind: str, options: dict[str, Any], saving: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=kind == "tied")
    model = (Qwen2ForSequenceClassification if kind == "head" else Qwen2ForCausalLM)(config)
    model.config.pad_token_id = 0
    folder = tmp_path / "model"
    model.save_pretrained(folder, **saving)
    if kind == "adapter":
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
        config_file = tmp_path / "adapter" / "adapter_config.json"
        told = json.loads(config_file.read_text()) | {"base_model_name_or_path": str(folder)}
        config_file.write_text(json.dumps(told))
    source = tmp_path / "adapter" if kind == "adapter" else folder
    of = AutoModelForSequenceClassification if kind == "head" else AutoModelForCausalLM
    loaded = load_pretrained(of, str(source), **options).eval()
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) - (kind == "adapter") == 1 if not saving else len(files) > 2
    for file in files:  # first of all: a model that is mapped would end this process with the next step
        with file.open("r+b") as stream:
            stream.seek(8 + int.from_bytes(stream.read(8), "little"))
            stream.write(b"\x3f" * (file.stat().st_size - stream.tell()))
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for file in files:
        os.truncate(file, 0)
    assert loaded(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    if kind == "tied":
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
