"""Models with a head, so small that a test can make them."""

from pathlib import Path
from typing import Any

import torch


def save_tiny(folder: Path, kind: str, *, width: int, special: str = "pad", **config: Any) -> Path:
    """Saves a model with random weights and its tokenizer, one token per character.

    Args:
        folder: an empty one, which is returned.
        kind: class of transformers, such as ``LlamaForTokenClassification``.
        width: of all its layers.
        special: the one special token that the tokenizer has.
        config: further fields of ``LlamaConfig``.
    """
    import transformers
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    characters = [f"<{special}>", *map(chr, range(32, 127)), "\n"]
    tokens = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token=characters[0]))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    options: dict[str, Any] = {f"{special}_token": characters[0]}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, **options).save_pretrained(folder)
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 1, "num_attention_heads": 1, "pad_token_id": 0 if special == "pad" else None}
    sizes = {"vocab_size": len(characters), "hidden_size": width, "intermediate_size": width}
    getattr(transformers, kind)(transformers.LlamaConfig(**{**sizes, **layers, **config})).save_pretrained(folder)
    return folder
