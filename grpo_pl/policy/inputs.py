"""What a model reads beside the tokens of its prompts, such as pixels: who turns it into arguments of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from grpo_pl.policy.template import READER, PromptTemplate
from grpo_pl.types import Conversation, PromptInputs

if TYPE_CHECKING:  # texts are scored without torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class EncodedPrompt(NamedTuple):
    """A prompt as the model reads it."""

    ids: list[int]
    inputs: PromptInputs | None = None


class PromptReader(Protocol):
    """Reads problems that hold more than text. The tokenizer of a policy that does so has one."""

    @property
    def most_tokens(self) -> int:
        """Most tokens of one image."""

    def asked(self, asked: str | Conversation, columns: Mapping[str, Any]) -> str | Conversation:
        """The question as a conversation whose messages hold parts, where ``columns`` have something for it."""

    def encode(
        self, texts: Sequence[str], columns: Sequence[Mapping[str, Any]], *, add_special_tokens: bool
    ) -> list[EncodedPrompt]:
        """The rendered texts of prompts as the model reads them; a placeholder becomes as many tokens as it stands
        for."""

    def save_pretrained(self, folder: Any) -> None:
        """Writes what turns inputs into tensors, beside the tokenizer."""


class InputReading(Protocol):
    """Turns the inputs of prompts into arguments of one model, which has it as an attribute."""

    @property
    def probe(self) -> EncodedPrompt:
        """A short prompt with inputs, on which ways to compute are tried."""

    @property
    def token_id(self) -> int:
        """The token that stands in a prompt at each place where the model reads an input."""

    def prepare(self, model: Any) -> None:
        """Gives the model this reading, and changes of it what its weights do not tell."""

    def arguments(self, model: Any, ids: Tensor, inputs: Sequence[PromptInputs]) -> dict[str, Any]:
        """What the model gets in place of token ids (rows, width) whose prompts have these inputs, in their order."""

    def embeddings(self, model: Any, inputs: Sequence[PromptInputs]) -> list[Tensor]:
        """(n, H) of each: what the language model reads at the n places of its prompt. Equal inputs are read once."""


_READING = "_grpo_pl_reading"
_UNREAD = "grpo_pl_unread"


def use_reader(tokenizer: PreTrainedTokenizerBase, reader: PromptReader) -> None:
    """Gives a tokenizer the reader of its policy's prompts."""
    setattr(tokenizer, READER, reader)


def reader_of(tokenizer: Any) -> PromptReader | None:
    """The reader of a policy's prompts; None where they are text."""
    return getattr(tokenizer, READER, None)


def use_reading(model: PreTrainedModel, reading: InputReading) -> None:
    """Gives a model what reads the inputs of its prompts."""
    setattr(model, _READING, reading)


def reading_of(model: Any) -> InputReading | None:
    """What reads the inputs of a model's prompts; None of a model that reads text alone."""
    return getattr(model, _READING, None)


def auto_class(*, images: bool) -> Any:
    """The class of transformers that makes and loads a policy, of text alone or of images as well."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def inputs_as_bytes(inputs: PromptInputs) -> bytes:
    """Inputs on their way to another process, which shares no memory with this one."""
    from safetensors.torch import save

    return inputs.key.encode() + b"\n" + save(dict(inputs.tensors))


def inputs_of_bytes(packed: bytes) -> PromptInputs:
    """The inverse of `inputs_as_bytes`."""
    from safetensors.torch import load

    key, _, tensors = packed.partition(b"\n")
    return PromptInputs(key=key.decode(), tensors=load(tensors))


def asked_of(
    asked: str | Conversation, columns: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> str | Conversation:
    """What a template renders for a problem: its question, with a placeholder wherever the policy reads more.

    Raises:
        ValueError: the problem has an image, and the policy reads text.
    """
    reader = reader_of(tokenizer)
    if reader is not None:
        return reader.asked(asked, columns)
    messages = () if isinstance(asked, str) else asked
    parts = (part for message in messages if isinstance(message["content"], list) for part in message["content"])
    if has_pictures(columns) or any(part["type"] != "text" for part in parts):
        raise ValueError("the problem has an image, and the policy reads text: set model.policy.images true.")
    return asked


def has_pictures(columns: Mapping[str, Any]) -> bool:
    """True for columns with images that were read; one of that name that stands as it is in a file holds none."""
    pictures = columns.get("images")
    return isinstance(pictures, tuple) and any(hasattr(each, "png") for each in pictures)


def encode_prompt(
    asked: str | Conversation,
    columns: Mapping[str, Any],
    template: PromptTemplate,
    tokenizer: PreTrainedTokenizerBase,
) -> EncodedPrompt:
    """The tokens of a problem's prompt, and what the model reads beside them.

    Raises:
        ValueError: as `asked_of`, or what the problem holds cannot be read.
    """
    return encode_prompts([(asked, columns)], template, tokenizer)[0]


def encode_prompts(
    problems: Sequence[tuple[str | Conversation, Mapping[str, Any]]],
    template: PromptTemplate,
    tokenizer: PreTrainedTokenizerBase,
) -> list[EncodedPrompt]:
    """`encode_prompt` of several problems, each its question and columns."""
    asked = [asked_of(question, columns, tokenizer) for question, columns in problems]
    if (reader := reader_of(tokenizer)) is None:
        return [EncodedPrompt(template.encode(each, tokenizer)) for each in asked]
    texts = [template.render(each, tokenizer) for each in asked]
    columns = [columns for _, columns in problems]
    return reader.encode(texts, columns, add_special_tokens=not template.through_chat(tokenizer))


def model_arguments(model: Any, ids: Tensor, inputs: Sequence[PromptInputs | None] | None) -> dict[str, Any]:
    """What ``model`` gets for token ids (rows, width): these, or what its reading makes of them and of ``inputs``, one
    entry for each prompt in the order in which prompts stand in the ids. A sharded model whose gradients are computed
    reads them within its forward pass, see `read_within_forward`.

    Raises:
        ValueError: there are inputs, and the model reads none.
    """
    given = [each for each in inputs or () if each is not None]
    if (reading := reading_of(model)) is not None:
        if hasattr(model, "unshard"):  # sharded by FSDP2
            import torch

            if torch.is_grad_enabled():
                return {"input_ids": ids, _UNREAD: given}
            model.unshard()  # what reads inputs, which stays so until the forward pass that follows
        return reading.arguments(model, ids, given)
    if given:
        raise ValueError(
            f"{type(model).__name__} reads text, and the prompts have images: set `images: true` for this model, too."
        )
    return {"input_ids": ids}


def read_within_forward(model: PreTrainedModel) -> None:
    """Lets a sharded model read the inputs of its prompts within its forward pass: there FSDP2 has gathered the weights
    that do so, and it sums the gradients of these weights once nothing before the forward pass needs them any more."""

    def read(module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if (inputs := given.pop(_UNREAD, None)) is None:
            return None
        ids, reading = given.pop("input_ids"), reading_of(module)
        assert reading is not None, "only model_arguments leaves inputs unread"
        return args, {**given, **reading.arguments(module, ids, inputs)}

    model.register_forward_pre_hook(read, with_kwargs=True)
