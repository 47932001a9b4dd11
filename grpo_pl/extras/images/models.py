"""Image-text models: their processors without a video part, and what a policy with images changes of a loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_pl.extras.images.picture import Picture
from grpo_pl.extras.images.reader import ImageReader
from grpo_pl.extras.images.reading import ImageReading
from grpo_pl.files.rows import read_object
from grpo_pl.policy.inputs import use_reader
from grpo_pl.policy.pretrained import one_clear_line
from grpo_pl.policy.template import PLACEHOLDER

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_IDEFICS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
MARKUP: Mapping[str, tuple[str, ...]] = {"smolvlm": _IDEFICS, "idefics3": _IDEFICS, "llava": ()}
"""Model type -> tokens that its processor writes beside the placeholder. Models of these types have ordinary positions
and causal masks."""
_PROCESSORS = {  # SmolVLM's own wants num2words and a video processor, which imports torchvision
    "smolvlm": ("Idefics3Processor", "SmolVLMImageProcessorPil"),
    "idefics3": ("Idefics3Processor", "Idefics3ImageProcessorPil"),
    "llava": ("LlavaProcessor", "CLIPImageProcessorPil"),
}


def known_type(model_type: str) -> str:
    """The same.

    Raises:
        ValueError: images are not supported for models of this type.
    """
    if model_type not in MARKUP:
        raise ValueError(
            f"policy.images: {model_type} is not supported; {', '.join(MARKUP)} are. Set it false for a model of text."
        )
    return model_type


def placeholder_tokens(model_type: str) -> list[str]:
    """The tokens that a tokenizer made from scratch needs for images."""
    return [PLACEHOLDER, *MARKUP[known_type(model_type)]]


def give_reader(tokenizer: PreTrainedTokenizerBase, config: Any, folder: str | None, *, most_tokens: int) -> None:
    """Gives the tokenizer of an image-text model the reader of its prompts.

    Args:
        config: of the model.
        folder: hub name or folder with the settings of its processor; None makes those of a model from scratch.
        most_tokens: of one image.
    """
    import transformers

    processor_name, image_processor_name = _PROCESSORS[known_type(config.model_type)]
    settings = _made_settings(config)
    if folder is None:
        images = getattr(transformers, image_processor_name)(**_made_image_settings(config))
    else:
        with one_clear_line(folder, "image processor"):
            images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
            saved = _saved_settings(folder)
        settings |= {name: saved[name] for name in settings if saved.get(name) is not None}
    template = tokenizer.chat_template
    processor = getattr(transformers, processor_name)(images, tokenizer, chat_template=template, **settings)
    use_reader(tokenizer, ImageReader(processor=processor, tokenizer=tokenizer, most_tokens=most_tokens))


def _saved_settings(source: str) -> dict[str, Any]:
    """Settings of the processor of a saved model, a folder or a name on the hub; older models have none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    file = Path(source) / "processor_config.json"
    if not file.parent.is_dir():
        with suppress(EntryNotFoundError):
            file = Path(hf_hub_download(source, file.name))
    return read_object(file) if file.is_file() else {}


def _made_settings(config: Any) -> dict[str, Any]:
    """Settings of a processor that follow from the model."""
    vision = config.vision_config
    if config.model_type == "llava":
        return {
            "patch_size": vision.patch_size,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
            "num_additional_image_tokens": 1,  # CLIP's class token
        }
    return {"image_seq_len": (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2}


def _made_image_settings(config: Any) -> dict[str, Any]:
    """Settings of the image processor of a model from scratch: an image is scaled to the square that the model sees."""
    size = config.vision_config.image_size
    if config.model_type == "llava":
        return {"size": {"height": size, "width": size}, "do_center_crop": False}
    longest = {"longest_edge": size}
    return {"size": longest, "max_image_size": longest, "do_image_splitting": False}


def prepare_model(model: PreTrainedModel, tokenizer: Any, *, train_vision: bool) -> None:
    """Makes a loaded image-text model a policy, in place: it never writes a placeholder, and its vision tower is frozen
    unless ``train_vision``.

    Raises:
        ValueError: model and processor have other tokens for images.
    """
    reader: ImageReader = tokenizer.grpo_pl_reader
    token_id = int(reader.processor.image_token_id)
    if model.config.image_token_id != token_id:
        raise ValueError(
            f"the model takes token {model.config.image_token_id} for images, and its processor writes {token_id}: "
            "give a folder in which both are of one model."
        )
    tower: torch.nn.Module = model.get_encoder(modality="image")
    tower.requires_grad_(train_vision)
    grey = Picture.of(bytes([128]) * 3 * 16 * 16, 16, 16)
    with torch.device("cpu"):  # also where the model lies on the meta device, on which there are no pixels
        (probe,) = reader.encode([PLACEHOLDER + "\n"], [{"images": (grey,)}], add_special_tokens=False)
    never = _placeholder_ids(tokenizer, model.config.model_type)
    reading = ImageReading(probe=probe, token_id=token_id, never_written=never)
    reading.prepare(model)
    if train_vision and not model.get_input_embeddings().weight.is_meta:  # where parameters are counted alone
        _freeze_unused(model, tower, reading)


def _placeholder_ids(tokenizer: Any, model_type: str) -> list[int]:
    """Tokens that stand for images or around them, but the end of an utterance, which a policy may write."""
    tokens = {PLACEHOLDER, *MARKUP[model_type]} - {"<end_of_utterance>"}
    if MARKUP[model_type]:
        tokens |= {f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)}
    return sorted(number for token, number in tokenizer.get_vocab().items() if token in tokens)


def _freeze_unused(model: Any, tower: torch.nn.Module, reading: ImageReading) -> None:
    """Freezes the weights of a tower on which no image depends, such as a last layer whose output the model does not
    read: they would have no gradient, for which data-parallel processes wait."""
    assert reading.probe.inputs is not None
    with torch.enable_grad():
        (read,) = reading.embeddings(model, [reading.probe.inputs])
        weights = list(tower.parameters())
        gradients = torch.autograd.grad(read.sum(), weights, allow_unused=True)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.requires_grad_(gradient is not None)
