"""What the config of a model from a stranger may hold: plain values that name no code and cost nothing to read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Attention implementations that are part of ``transformers``; other names are repositories of the hub."""
_CODE = frozenset(
    {"auto_map", "auto_mapping", "custom_pipelines", "kernel_config", "quantization_config", "speculators_config"}
    | {"attribute_map", "sub_configs"}
)
"""By these ``transformers`` or an engine imports modules, takes kernels or loads other models."""
_MOST = {"label": 512, "layer": 4096, "block": 4096, "stage": 4096, "expert": 65536}
"""Largest value of a key that ends so: config classes make as many entries, and models as many modules."""
_COUNT = re.compile(f"({'|'.join(_MOST)})s?$")


def check_plain_config(config: Mapping[str, Any]) -> None:
    """Looks at a config before `transformers` does.

    Raises:
        ValueError: a value names code or another model, would replace a method of the config, or asks for more of
            something than any model has.
    """
    from transformers import PreTrainedConfig

    taken = {name for name in dir(PreTrainedConfig) if name[:2] == "__" or callable(getattr(PreTrainedConfig, name))}
    for key, value in _entries(config):
        if key in taken:
            raise ValueError(f"a policy's config must not hold {key!r}, which is a method of configs.")
        if key in _CODE and value not in (None, {}, []):
            raise ValueError(f"a policy's config must not hold {key!r}: no code, kernel or other model is loaded.")
        if key.endswith("_implementation") or key.strip("_").startswith("attn_implementation"):
            _check_implementation(key, value)
        labels = len(value) if key in ("id2label", "label2id") and isinstance(value, Mapping) else 0
        count = value if isinstance(value, int | float) and _COUNT.search(key) else 0
        kind = match[1] if (match := _COUNT.search(key)) else "label"
        if labels > _MOST["label"] or count > _MOST[kind]:
            raise ValueError(f"a policy's config: {key} is {labels or count}, which no model has.")


def _check_implementation(key: str, value: Any) -> None:
    for name in value.values() if isinstance(value, Mapping) else [value]:
        known = name in ATTENTION if "attn" in key else isinstance(name, str) and name.isidentifier()
        if name is not None and not known:
            raise ValueError(f"a policy's config asks for the kernel {name!r} in {key}: known are {ATTENTION}.")


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """All keys with their values, those of nested objects as well."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key), inner
            if key not in ("id2label", "label2id"):
                yield from _entries(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            if isinstance(inner, Mapping | list | tuple):
                yield from _entries(inner)
