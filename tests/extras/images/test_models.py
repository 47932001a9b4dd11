"""Loading image-text models, their tokenizers and processors."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_pl.policy.inputs import encode_prompt, reading_of
from grpo_pl.policy.loading import PolicyConfig, check_weights, load_model, load_tokenizer
from grpo_pl.policy.lora import Lora
from grpo_pl.policy.template import Example, PromptTemplate
from tests.images import FAMILIES, SMOLVLM_CHAT, image_policy, picture

TEMPLATE = PromptTemplate()
MARKED = {"smolvlm": 7, "idefics3": 7, "llava": 4}
"""Tokens that an image of the tiny models takes, its markup among them."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_question_has_its_images_before_its_text_and_each_takes_as_many_tokens_as_the_model_gives_it(
    family: str,
) -> None:
    policy = image_policy(family)
    tokenizer = load_tokenizer(policy)
    model: Any = load_model(policy, tokenizer)
    shown = encode_prompt("How many?", {"images": (picture(0), picture(1, 40, 20))}, TEMPLATE, tokenizer)
    text = TEMPLATE.encode("How many?", tokenizer)
    assert shown.ids[-len(text) :] == text
    assert len(shown.ids) == 2 * MARKED[family] + len(text)
    assert shown.ids.count(model.config.image_token_id) == 8
    assert shown.inputs is not None
    (read,) = reading_of(model).embeddings(model, [shown.inputs])  # type: ignore[union-attr]
    assert read.shape == (8, 32)


def test_images_stand_where_the_messages_of_a_conversation_have_them() -> None:
    tokenizer = load_tokenizer(image_policy())
    content = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    shown = encode_prompt(({"role": "user", "content": content},), {"images": (picture(0),)}, TEMPLATE, tokenizer)
    image = tokenizer.convert_tokens_to_ids("<image>")
    assert [tokenizer.decode([shown.ids[0]]), tokenizer.decode([shown.ids[-1]])] == ["a", "b"]
    assert shown.ids[3:7] == [image] * 4 and len(shown.ids) == 2 + MARKED["smolvlm"]


def test_without_images_a_prompt_is_that_of_the_text_policy() -> None:
    tokenizer = load_tokenizer(image_policy())
    assert encode_prompt("1+1=", {}, TEMPLATE, tokenizer) == (TEMPLATE.encode("1+1=", tokenizer), None)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_read_back_by_us_and_by_transformers(family: str, tmp_path: Path) -> None:
    policy = image_policy(family)
    tokenizer = load_tokenizer(policy)
    model = load_model(policy, tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.grpo_pl_reader.save_pretrained(tmp_path)
    again = PolicyConfig(path=str(tmp_path), images=True)
    read = load_tokenizer(again)
    columns = {"images": (picture(3, 30, 50),)}
    first, second = (encode_prompt("Which?", columns, TEMPLATE, each) for each in (tokenizer, read))
    assert first.ids == second.ids
    assert first.inputs is not None and second.inputs is not None
    assert first.inputs.key == second.inputs.key
    for name, tensor in first.inputs.tensors.items():
        assert torch.equal(tensor, second.inputs.tensors[name])
    for name, weight in load_model(again, read).state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    theirs = AutoProcessor.from_pretrained(tmp_path)(images=[picture(3, 30, 50).pil()], text=["<image>Which?"])
    assert theirs["input_ids"][0] == first.ids
    AutoModelForImageTextToText.from_pretrained(tmp_path)


def split_into_tiles(folder: Path) -> PolicyConfig:
    """A policy of SmolVLM in ``folder``, whose processor cuts images into tiles of 16x16."""
    policy = image_policy()
    tokenizer = load_tokenizer(policy)
    load_model(policy, tokenizer).save_pretrained(folder)
    tokenizer.grpo_pl_reader.save_pretrained(folder)
    file = folder / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"] |= {"do_image_splitting": True, "size": {"longest_edge": 32}}
    file.write_text(json.dumps(settings))
    return PolicyConfig(path=str(folder), images=True)


def test_an_image_in_tiles_has_the_tokens_of_each(tmp_path: Path) -> None:
    policy = split_into_tiles(tmp_path)
    tokenizer = load_tokenizer(policy)
    model: Any = load_model(policy, tokenizer)
    # 32x32 are four tiles and the whole image, 32x16 two and the whole; together they are padded to eight
    for pictures, tiles in (((picture(0),), 5), ((picture(0, 40, 20),), 3), ((picture(0), picture(1, 40, 20)), 8)):
        shown = encode_prompt("?", {"images": pictures}, TEMPLATE, tokenizer)
        assert shown.ids.count(model.config.image_token_id) == 4 * tiles
        assert shown.inputs is not None
        (read,) = reading_of(model).embeddings(model, [shown.inputs])  # type: ignore[union-attr]
        assert read.shape == (4 * tiles, 32)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_placeholder_can_be_written(family: str) -> None:
    policy = image_policy(family)
    tokenizer = load_tokenizer(policy)
    model: Any = load_model(policy, tokenizer)
    written = model(torch.tensor([TEMPLATE.encode("1+1=", tokenizer)])).logits.softmax(dim=-1)
    names = {"<image>"} if family == "llava" else {"<image>", "<global-img>", "<fake_token_around_image>"}
    never = {tokenizer.decode([i]) for i in range(len(tokenizer)) if not written[..., i].any()}
    assert never == names
    assert not any("bias" in name for name in model.state_dict() if name.startswith("lm_head"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("train_vision", [False, True])
def test_the_vision_tower_is_trained_on_demand_alone(family: str, train_vision: bool) -> None:
    policy = image_policy(family, train_vision=train_vision)
    model: Any = load_model(policy, load_tokenizer(policy))
    trained = [weight.requires_grad for weight in model.get_encoder(modality="image").parameters()]
    assert any(trained) == train_vision
    assert all(weight.requires_grad for weight in model.get_decoder().parameters())


def test_adapters_are_in_the_language_model_alone() -> None:
    policy = image_policy(lora=Lora(rank=2))
    model = load_model(policy, load_tokenizer(policy))
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained and all("text_model" in name and "lora_" in name for name in trained)


def test_a_model_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="qwen2 is not supported"):
        load_tokenizer(PolicyConfig(from_scratch={"model_type": "qwen2"}, images=True))


@pytest.mark.parametrize("fields", [{"images": False}, {"lora": Lora(rank=2)}])
def test_a_vision_tower_that_cannot_be_trained_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="train_vision"):
        replace(image_policy(), train_vision=True, **fields)


def test_a_text_policy_refuses_a_problem_with_an_image() -> None:
    tokenizer = load_tokenizer(PolicyConfig(from_scratch={"model_type": "qwen2"}))
    content = [{"type": "image"}, {"type": "text", "text": "b"}]
    for asked in ("How many?", ({"role": "user", "content": content},)):
        with pytest.raises(ValueError, match="images true"):
            encode_prompt(asked, {"images": (picture(0),)}, TEMPLATE, tokenizer)


def test_a_column_of_that_name_without_images_stays_a_column() -> None:
    for policy in (PolicyConfig(from_scratch={"model_type": "qwen2"}), image_policy()):
        tokenizer = load_tokenizer(policy)
        for value in (("a", "b"), ["a.png"], "a.png", 3, None):
            assert encode_prompt("1+1=", {"images": value}, TEMPLATE, tokenizer).inputs is None


def test_the_placeholder_in_a_text_is_no_image() -> None:
    tokenizer = load_tokenizer(image_policy())
    for columns in ({}, {"images": (picture(0),)}):
        with pytest.raises(ValueError, match="places for images"):
            encode_prompt("What is <image>?", columns, TEMPLATE, tokenizer)


def test_an_image_of_too_many_tokens_is_refused_with_its_size() -> None:
    tokenizer = load_tokenizer(image_policy(max_image_tokens=3))
    with pytest.raises(ValueError, match=r"image of 16x24 takes 4 tokens, and policy.max_image_tokens is 3"):
        encode_prompt("?", {"images": (picture(0, 16, 24),)}, TEMPLATE, tokenizer)


def test_several_small_images_may_take_more_than_one_may() -> None:
    tokenizer = load_tokenizer(image_policy(max_image_tokens=4))
    shown = encode_prompt("?", {"images": tuple(map(picture, range(3)))}, TEMPLATE, tokenizer)
    assert len(shown.ids) == 3 * MARKED["smolvlm"] + 1


def test_a_text_policy_loads_nothing_of_images() -> None:
    code = (
        "import sys; from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer\n"
        "from grpo_pl.rollout.sampler import CompletionSampler\n"
        "p = PolicyConfig(from_scratch={'model_type': 'qwen2', 'hidden_size': 8, 'intermediate_size': 8,"
        " 'num_hidden_layers': 1, 'num_attention_heads': 2, 'num_key_value_heads': 2})\n"
        "load_model(p, load_tokenizer(p)); print([m for m in sys.modules if m.startswith(('grpo_pl.extras.images',"
        " 'torchvision'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("family", FAMILIES)
def test_such_a_model_is_refused_without_the_field(family: str, tmp_path: Path) -> None:
    load_model(image_policy(family), load_tokenizer(image_policy(family))).save_pretrained(tmp_path)
    scratch, saved = PolicyConfig(from_scratch=FAMILIES[family]), PolicyConfig(path=str(tmp_path))
    tokenizer = load_tokenizer(scratch)
    told = rf"^{family} is an image-text model: set `policy\.images: true`\.$"
    for policy in (scratch, saved):
        for weights in (True, False):
            with pytest.raises(ValueError, match=told):
                load_model(policy, tokenizer, weights=weights)
    with pytest.raises(ValueError, match=told):
        check_weights(saved)


CHATML = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{{ '\\n' }}{% endfor %}"


@pytest.mark.parametrize(
    ("chat_template", "asked"),
    [(SMOLVLM_CHAT, "System: Be brief.\nUser: 1\nAssistant: 2\nUser: How many?\nAssistant:"),
     (CHATML, "system:Be brief.\nuser:1\nassistant:2\nuser:How many?\n")],
)  # fmt: skip
def test_a_chat_template_shows_all_texts_of_a_prompt(chat_template: str, asked: str) -> None:
    tokenizer = load_tokenizer(image_policy())
    tokenizer.chat_template = chat_template
    template = PromptTemplate(system="Be brief.", examples=[Example(question="1", completion="2")])
    assert template.render("How many?", tokenizer) == asked
    if chat_template == SMOLVLM_CHAT:
        seen = encode_prompt("How many?", {"images": (picture(0),)}, template, tokenizer)
        text = tokenizer.decode(seen.ids)
        assert text.startswith("System: Be brief.") and text.endswith("How many?\nAssistant:")
        turns = [{"role": "user", "content": "How many?"}]
        assert PromptTemplate().render(tuple(turns), tokenizer) == "User: How many?\nAssistant:"


@pytest.mark.parametrize(
    ("family", "saved", "tokens"),
    [("smolvlm", {"image_seq_len": 9}, 9), ("llava", {"num_additional_image_tokens": 6}, 9)],
)
def test_the_settings_of_a_processor_are_read_by_a_name_of_the_hub_as_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, saved: dict[str, Any], tokens: int
) -> None:
    """From the cache; a repository of an older model has no file with them."""
    repository, commit = tmp_path / "models--someone--seeing", 40 * "1"
    folder, policy = repository / "snapshots" / commit, image_policy(family)
    tokenizer = load_tokenizer(policy)
    load_model(policy, tokenizer).save_pretrained(folder)
    tokenizer.grpo_pl_reader.save_pretrained(folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    file = folder / "processor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | saved))

    def placeholders(path: object) -> int:
        ids = load_tokenizer(PolicyConfig(path=str(path), images=True))
        shown = encode_prompt("?", {"images": (picture(0),)}, TEMPLATE, ids)
        return shown.ids.count(ids.convert_tokens_to_ids("<image>"))

    assert placeholders(folder) == placeholders("someone/seeing") == tokens
    (folder / "preprocessor_config.json").write_text(json.dumps(settings["image_processor"]))
    file.unlink()
    assert placeholders("someone/seeing") == 4
