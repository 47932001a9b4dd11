"""Tiny random image-text models and pictures for tests, made from configurations."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from grpo_pl.extras.images.picture import Picture
from grpo_pl.policy.loading import PolicyConfig

_TEXT = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.3,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
SMOLVLM: dict[str, Any] = {
    "model_type": "smolvlm",
    "scale_factor": 2,
    "tie_word_embeddings": True,
    "text_config": {**_TEXT, "tie_word_embeddings": True},
    "vision_config": {**_VISION, "initializer_range": 0.3},
}
"""Four tokens an image, and two of markup before and one behind them."""
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "text_config": _TEXT,
    "vision_config": {
        **{**_VISION, "patch_size": 8},
        "model_type": "clip_vision_model",
        "projection_dim": 16,
        "initializer_range": 0.3,
    },
}
"""Four tokens an image."""
FAMILIES = {"smolvlm": SMOLVLM, "idefics3": {**SMOLVLM, "model_type": "idefics3"}, "llava": LLAVA}

SMOLVLM_CHAT = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""As SmolVLM and Idefics3 have it: it reads parts of messages, and nothing of a message that is a text."""


def image_policy(family: str = "smolvlm", **fields: Any) -> PolicyConfig:
    """A policy of some thousand random weights."""
    return PolicyConfig(from_scratch=FAMILIES[family], images=True, **fields)


def picture(number: int, width: int = 16, height: int = 16) -> Picture:
    """Noise, another for each number."""
    return Picture.of(random.Random(number).randbytes(3 * width * height), width, height)


def training(**policy: Any) -> dict[str, Any]:
    """Changes of the tiny configuration (``CommandLine.config``) for a policy that learns drawn shapes, and sums
    without images."""
    shapes = {"class_path": "grpo_pl.data.tasks.shapes.ShapePrompts", "init_args": {"questions": ["count"]}}
    sums = {
        "class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts",
        "init_args": {"digits": 1, "scratchpad_share": 0.0},
    }
    parts = {"parts": {"shapes": shapes, "sums": sums}}
    return {
        "model__policy": {"from_scratch": SMOLVLM, "images": True, **({} if "lora" in policy else SEEING), **policy},
        "data__source": {"class_path": "grpo_pl.data.mixture.MixturePrompts", "init_args": parts},
        "model__cold_start": {"steps": 20, "batch_size": 16, "lr": 0.01},
        "model__max_tokens_per_microbatch": 150,
    }


def on_images(config: Path, file: Path, **policy: Any) -> Path:
    """Writes ``config`` into ``file`` with these changes, for runs of other tests."""
    tree = yaml.safe_load(config.read_text())
    for place, value in training(**policy).items():
        part, _, field = place.partition("__")
        tree[part][field] = value
    file.write_text(yaml.safe_dump(tree))
    return file


SEEING = {"train_vision": True}
