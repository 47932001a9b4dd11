"""``ModelReward``: a Hugging Face sequence-classification model as the reward."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.policy.pretrained import check_pretrained, load_pretrained, one_clear_line
from grpo_pl.rewards.base import Columns, Reward, Score

_HEAD = "score"
"""The one module that may be new: what transformers calls the head that it puts on a causal language model."""


@dataclass(kw_only=True)
class LoadsModel(Reward):
    """A reward that loads a model on first use and may be called from several threads, as the server does.

    The model's folder cannot run code: weights are read from safetensors files only, and model classes that the folder
    defines are refused. So is a model whose files lack a part of its weights, but for the head of one that is made of a
    causal language model: its values are random, the same at each load, and a warning says so.
    """

    model_class: ClassVar[str]
    """Class of transformers that loads the model."""
    tokenizer_options: ClassVar[Mapping[str, Any]]
    """Options of the tokenizer: the sides on which it pads and truncates."""
    model: str
    """Hub name or local folder of a model with the head that this reward reads."""
    label: int
    """Index of the label of the head that is read."""
    batch_size: int
    """Texts per forward pass."""
    max_length: int
    """Most tokens of prompt and completion together."""
    device: str = "cpu"
    """Device on which the model runs, such as ``cuda``."""
    check_remote: bool = False
    """Load the model and score a few texts before a run starts."""
    _loaded: tuple[Any, Any] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        check_at_least(1, f"reward {self.name!r}", batch_size=self.batch_size, max_length=self.max_length)

    def check(self) -> None:
        """Refuses a model whose files lack a part of its weights, by their headers.

        Raises:
            ValueError: names it.
        """
        import transformers

        with _LOCK:
            check_pretrained(getattr(transformers, self.model_class), self.model, head=_HEAD)

    def close(self) -> None:
        self._loaded = None

    @property
    def loaded(self) -> tuple[Any, Any]:
        """(model, tokenizer), loaded now if they are not yet."""
        with _LOCK:
            if self._loaded is None:
                self._loaded = self._from_folder()
            return self._loaded

    def _from_folder(self) -> tuple[Any, Any]:
        """Loads (model, tokenizer) from the hub or folder; the model is in evaluation mode on ``device``."""
        import transformers

        with one_clear_line(self.model, "tokenizer"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                self.model, trust_remote_code=False, **self.tokenizer_options
            )
        model = load_pretrained(getattr(transformers, self.model_class), self.model, head=_HEAD)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if model.config.pad_token_id is None:  # decoder models find the last token by it
            model.config.pad_token_id = tokenizer.pad_token_id
        return model.to(self.device).eval(), tokenizer

    def _logits(self, texts: Sequence[str], **options: Any) -> tuple[Any, Any]:
        """(batch, logits): the tokens of B texts, cut to ``max_length`` and padded to (B, S), and the logits in
        float32, (B, labels) or (B, S, labels) by the head. The logits are None if no text has a token (S = 0).

        Raises:
            ValueError: the model has no label ``label``.
        """
        import torch

        model, tokenizer = self.loaded
        # a lone surrogate, which tokenizers refuse, becomes a question mark; offsets do not change
        texts = [text.encode(errors="replace").decode() for text in texts]
        with _LOCK:
            batch = tokenizer(
                texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt", **options
            )
        if batch.input_ids.shape[1] == 0:
            return batch, None
        names = [name for name in tokenizer.model_input_names if name in batch]
        with torch.inference_mode():
            logits = model(**{name: batch[name].to(self.device) for name in names}).logits.float()
        if self.label >= logits.shape[-1]:
            raise ValueError(f"label {self.label} of {self.model!r}: the model has only {logits.shape[-1]} labels.")
        return batch, logits

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}


_LOCK = threading.Lock()
"""One lock for all model rewards: ``from_pretrained`` changes settings of the whole process while it runs, and a fast
tokenizer raises "Already borrowed" if its padding or truncation changes during another call."""


@dataclass(kw_only=True)
class ModelReward(LoadsModel):
    """The score that a sequence-classification model gives to prompt and completion.

    With ``activation: none`` the value is the logit of ``label``, range (−∞, ∞); with ``sigmoid`` its logistic, with
    ``softmax`` its probability among all labels, range [0, 1]. The text is ``prompt + completion``; a text longer than
    ``max_length`` loses its beginning, so that the model always sees the end of the completion. A policy can exploit
    the errors of a learned reward: keep a verifiable reward as the ``correctness`` one.

    The model is loaded on first use, and its folder cannot run code: see `LoadsModel`. A value that is not finite is an
    error, which ends the run. Where neither prompt nor completion has a token, the score is ``None``.
    """

    model_class: ClassVar[str] = "AutoModelForSequenceClassification"
    tokenizer_options: ClassVar[Mapping[str, Any]] = {"truncation_side": "left"}
    name: str = "model"
    label: int = 0
    """Index of the logit that is the reward."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """Function that is applied to the logits."""
    batch_size: int = 16
    max_length: int = 1024

    def __post_init__(self) -> None:
        if self.activation not in ("none", "sigmoid", "softmax"):
            raise ValueError(f"activation must be 'none', 'sigmoid' or 'softmax', got {self.activation!r}.")
        super().__post_init__()

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        prompts = columns.get("prompt", [""] * len(completions))
        texts = [f"{prompt}{text}" for prompt, text in zip(prompts, completions, strict=True)]
        # sorted by length, so that the texts of a batch need little padding
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        values: list[float | None] = [None] * len(texts)
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            for i, value in zip(rows, self._forward([texts[i] for i in rows]), strict=True):
                values[i] = value
        return [Score(None, "unavailable", "no text") if value is None else Score.of(value) for value in values]

    def _forward(self, texts: list[str]) -> list[float | None]:
        """The value of each text; None where it has no tokens."""
        batch, logits = self._logits(texts)  # (texts, labels)
        if logits is None:
            return [None] * len(texts)
        if self.activation == "softmax":
            logits = logits.softmax(dim=1)
        elif self.activation == "sigmoid":
            logits = logits.sigmoid()
        values: list[float] = logits[:, self.label].tolist()
        if not all(map(math.isfinite, values)):
            raise ValueError(f"reward model {self.model!r} returned a value that is not finite.")
        empty = (batch.attention_mask.sum(dim=1) == 0).tolist()
        return [None if nothing else value for value, nothing in zip(values, empty, strict=True)]
