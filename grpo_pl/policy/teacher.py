"""``TeacherConfig``: the teacher's model or server, and the check that it reads the same tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from grpo_pl.functional.argument_checks import check_at_least, check_within
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.types import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS_COMPARED = 10


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """A frozen model whose next-token distributions the policy learns from, on the policy's own samples."""

    path: str
    """Hub name, GGUF file, or local folder in the Hugging Face layout, such as the export of a run; with ``url`` that
    of the tokenizer alone."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Type of the weights; auto takes that of the files."""
    attn_implementation: str | None = None
    """``sdpa``, ``eager``, ``flash_attention_2`` …; null lets transformers choose."""
    url: str | None = None
    """Address of an OpenAI-compatible server that returns the log-probabilities of prompts (``echo`` with
    ``logprobs``), such as vLLM's or that of ``grpo-pl serve``: ``http://localhost:8000/v1``. It takes the place of a
    model in this process, and gives those of single tokens only."""
    served_name: str | None = None
    """Name of the model at the server; null takes ``path``."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the server's key; need not be set."""
    time_limit_s: float = 300.0
    """Time limit of one request in seconds."""
    retries: int = 3
    """Further requests after one that failed."""
    rows_per_request: int = 16
    """Completions in one request."""
    concurrency: int = 4
    """Requests in flight at a time."""

    def __post_init__(self) -> None:
        check_at_least(1, "teacher", rows_per_request=self.rows_per_request, concurrency=self.concurrency)
        check_at_least(0, "teacher", retries=self.retries)
        check_within("(0, inf)", "teacher", time_limit_s=self.time_limit_s)

    @property
    def model(self) -> PolicyConfig:
        """The configuration that loads the model, or its tokenizer."""
        return PolicyConfig(path=self.path, dtype=self.dtype, attn_implementation=self.attn_implementation)

    @property
    def api_key(self) -> str | None:
        """The server's key, where there is one."""
        return os.environ.get(self.api_key_variable)


def check_same_tokens(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    template: PromptTemplate,
    asked: Iterable[str | Conversation],
    *,
    name: str,
) -> None:
    """Refuses a teacher that would read other tokens than the student wrote.

    Every token of the student must have the same id in the teacher's vocabulary, which may have more of them, and both
    must cut the rendered prompts into the same tokens. Sizes of embeddings do not matter: padding makes them.

    Args:
        asked: questions or conversations, such as the first of a run.
        name: what the teacher is called in the message.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    other = sorted((id_, token) for token, id_ in ours.items() if theirs.get(token) != id_)
    if other:
        id_, token = other[0]
        found = f"is {theirs[token]}" if token in theirs else "is not in it"
        raise ValueError(
            f"{name} has another vocabulary: {len(other)} of the policy's {len(ours)} tokens differ, the first is "
            f"{token!r}, {id_} for the policy, which {found}. A teacher must read the tokens that the policy writes."
        )
    special = not template.through_chat(student)
    for question in asked:
        text = template.render(question, student)
        pair = [list(each(text, add_special_tokens=special).input_ids) for each in (student, teacher)]
        if pair[0] != pair[1]:
            at = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
            shown = [repr(student.decode(ids[at : at + 3])) for ids in pair]
            raise ValueError(
                f"{name} cuts prompts into other tokens: at token {at + 1} of {text[-80:]!r} the policy reads "
                f"{shown[0]} ({pair[0][at : at + 3]}), the teacher {shown[1]} ({pair[1][at : at + 3]})."
            )
