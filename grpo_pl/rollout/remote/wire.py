"""What a trainer and an engine's server send each other: JSON, and tensors as safetensors. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, FailFast, Field, TypeAdapter, ValidationError, with_config
from safetensors import torch as safetensors
from torch import Tensor

from grpo_pl.types import FinishReason, GenerateRequest, Rollout, SampleKey, SamplingParams, StopStrings

BUCKET_BYTES = 64 * 2**20
"""Weights that are sent at a time; a larger tensor goes alone."""
LENGTH_BYTES = 8
"""Of the number before each bucket: how many bytes it has, big-endian. A bucket of none ends a push."""
MOST_ROWS = 2**17
"""Completions of one request."""
MOST_TOKENS = 2**29
"""Tokens of all rows of one request together, completions at their longest."""
_ONE_TENSOR = 2**16  # bytes of a head, enough for one
DRAWN = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampling_logprobs")
"""Tensors of a rollout that are sent; the others follow from them."""
TOP = {"top_ids": torch.int32, "top_logprobs": torch.float32}
"""Those that are sent where the request asks for them, and their types."""
_NUMBER = {torch.int64: "prompt_ids completion_ids", torch.bool: "prompt_mask completion_mask"}
_TYPES = {name: kind for kind, names in _NUMBER.items() for name in names.split()} | {
    "sampling_logprobs": torch.float32
}


_Ids = Annotated[tuple[int, ...], FailFast()]
_ALIKE = [field.name for field in fields(GenerateRequest) if field.name != "stops"]  # which name their tokenizer here


class Malformed(ValueError):
    """What arrived is not what it should be; one line says why."""


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, kw_only=True)
class Stops:
    """Stop strings, with the name of the tokenizer that was sent before."""

    texts: Annotated[tuple[Annotated[str, Field(max_length=2**12)], ...], Field(min_length=1, max_length=2**10)]
    prefix: Annotated[str, Field(max_length=2**20)]
    tokenizer: str


def tokenizer_name(text: str, clean_up: bool) -> str:
    """What a tokenizer is called: a digest of all that is sent of it."""
    return hashlib.sha256(f"{clean_up}{text}".encode()).hexdigest()


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, kw_only=True)
class Request:
    """A `GenerateRequest` as it is sent, with limits of what an engine's server takes."""

    mark: str
    """Of the weights that it must be drawn from."""
    prompt_ids: Annotated[tuple[_Ids, ...], Field(max_length=MOST_ROWS), FailFast()]
    keys: Annotated[tuple[Annotated[tuple[SampleKey, ...], FailFast()], ...], Field(max_length=MOST_ROWS), FailFast()]
    sampling: SamplingParams
    eos_token_ids: Annotated[tuple[int, ...], Field(max_length=2**16), FailFast()]
    pad_token_id: int
    stops: Stops | None = None

    @classmethod
    def of(cls, request: GenerateRequest, *, mark: str, stops: Stops | None) -> Request:
        return cls(**{name: getattr(request, name) for name in _ALIKE}, mark=mark, stops=stops)

    def to_engine(self, stops: StopStrings | None) -> GenerateRequest:
        return GenerateRequest(**{name: getattr(self, name) for name in _ALIKE}, stops=stops)

    def encoded(self) -> bytes:
        return _REQUEST.dump_json(self)

    @classmethod
    def parsed(cls, body: bytes, *, vocabulary: int, longest: int) -> Request:
        """The request in a body.

        Args:
            vocabulary: how many tokens the policy knows.
            longest: most tokens of a prompt.

        Raises:
            Malformed: it is none, or no policy of that kind can answer it.
        """
        try:
            request = _REQUEST.validate_json(body, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise Malformed(f"{where + ': ' if where else ''}{first['msg']}") from None
        try:
            group_size = request.to_engine(None).group_size
        except ValueError as error:
            raise Malformed(str(error)) from None
        _check_tokens("prompt_ids", (t for ids in request.prompt_ids for t in ids), vocabulary)
        _check_tokens("eos_token_ids", request.eos_token_ids, None)
        _check_tokens("sampling.stop_token_ids", request.sampling.stop_token_ids, None)
        _check_tokens("pad_token_id", [request.pad_token_id], None)
        width = max(map(len, request.prompt_ids))
        if width >= longest:
            raise Malformed(f"prompt_ids: a prompt leaves no room for a token, there may be {longest} together.")
        sampling = request.sampling
        asked, top = sampling.max_completion_length, sampling.top_logprobs
        limits = (
            ("max_completion_length", asked, 2**24),
            ("top_k", sampling.top_k, 2**31),
            ("top_logprobs", top, 2**31),
        )
        for name, value, most in limits:
            if value > most:
                raise Malformed(f"sampling.{name}: {value} is more than {most}.")
        rows = len(request.keys) * group_size
        noted = max(1, min(top, vocabulary))
        if rows > MOST_ROWS or rows * min(width + asked, longest) * noted > MOST_TOKENS:
            raise Malformed(f"{rows} rows of up to {min(width + asked, longest)} tokens are too many for one request.")
        _check_keys(key for group in request.keys for key in group)
        return request


_REQUEST = TypeAdapter(Request)


def _check_keys(keys: Iterable[SampleKey]) -> None:
    for key in keys:
        if not (0 <= key.drawn < 2**31 and key.turn >= 0):
            raise Malformed(f"keys: turns and tokens drawn are counted from 0, got {key.turn} and {key.drawn}.")
        if max(map(abs, (key.seed, key.step, key.attempt, key.prompt_id, key.sample, key.turn))) >= 2**256:
            raise Malformed("keys: a number has more than 256 bits.")


def _check_tokens(name: str, tokens: Iterable[int], vocabulary: int | None) -> None:
    """The policy computes with tokens of prompts, and compares with others."""
    most = 2**31 if vocabulary is None else vocabulary
    wrong = next((token for token in tokens if not 0 <= token < most), None)
    if wrong is not None:
        raise Malformed(f"{name}: there is no token {wrong}, only 0 … {most - 1}.")


# --- rollouts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Head:
    mark: str
    group_size: int
    finish_reasons: list[FinishReason]


_HEAD = TypeAdapter(_Head)


def rollout_parts(rollout: Rollout, mark: str) -> tuple[dict[str, Any], bytes]:
    """Plain values and bytes of a rollout and the mark of the weights that it was drawn from."""
    head = {"mark": mark, "group_size": rollout.group_size, "finish_reasons": list(rollout.finish_reasons)}
    names = [*DRAWN, *(name for name in TOP if getattr(rollout, name) is not None)]
    return head, packed({name: getattr(rollout, name) for name in names})


def rollout_of(head: dict[str, Any], data: bytes, *, rows: int, top: bool = False) -> tuple[Rollout, str]:
    """The rollout of `rollout_parts`, and the mark.

    Args:
        top: the likeliest tokens were asked for.

    Raises:
        Malformed: it is none with so many rows.
    """
    try:
        known = _HEAD.validate_python({name: head.get(name) for name in (field.name for field in fields(_Head))})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise Malformed(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    tensors = unpacked(data)
    if top and not tensors.keys() >= TOP.keys():
        raise Malformed("its engine records no likeliest tokens, which model.algorithm.trust_region_top_k needs.")
    noted = {name: tensors.pop(name) for name in TOP if name in tensors}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    widths = {shape[-1] if shape else None for name, shape in shapes.items() if not name.startswith("prompt")}
    right = (
        tensors.keys() == _TYPES.keys()
        and all(tensors[name].dtype == kind for name, kind in _TYPES.items())
        and all(len(shape) == 2 and shape[0] == rows for shape in shapes.values())
        and shapes["prompt_ids"] == shapes["prompt_mask"]
        and len(widths) == 1
        and len(known.finish_reasons) == rows
        and known.group_size > 0
        and rows % known.group_size == 0
    )
    of_places = {tuple(tensor.shape) for tensor in noted.values()}
    right = right and (
        not of_places
        or (
            (noted.keys() == TOP.keys() and len(of_places) == 1)
            and all(len(shape) == 3 and shape[:2] == shapes["completion_ids"] for shape in of_places)
            and all(noted[name].dtype == kind for name, kind in TOP.items())
        )
    )
    if not right:
        raise Malformed(f"a rollout of {rows} rows has other tensors than {shapes}.")
    drawn: dict[str, Any] = tensors | noted
    return Rollout(group_size=known.group_size, finish_reasons=known.finish_reasons, **drawn), known.mark


# --- tensors ------------------------------------------------------------------------------------------------------


def packed(tensors: dict[str, Tensor]) -> bytes:
    """Tensors as one file of safetensors."""
    # which refuses tensors that share memory, as parts of a packed weight do
    return safetensors.save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})


def unpacked(data: bytes) -> dict[str, Tensor]:
    """The tensors of `packed`.

    Raises:
        Malformed: these are none.
    """
    try:
        return safetensors.load(data)
    except Exception as error:  # the library's own, and Python's for types that torch has not
        raise Malformed(f"these bytes are no safetensors: {' '.join(str(error).split())[:200]}") from None


def weight_buckets(weights: Iterable[tuple[str, Tensor]], size: int = BUCKET_BYTES) -> Iterator[dict[str, Tensor]]:
    """Tensors, as many at a time as fit into ``size`` bytes, a larger one alone."""
    bucket: dict[str, Tensor] = {}
    end = 0
    for name, tensor in weights:
        amount = tensor.numel() * tensor.element_size()
        if bucket and end + amount > size:
            yield bucket
            bucket, end = {}, 0
        bucket[name] = tensor
        end += amount
    if bucket:
        yield bucket


def check_bucket(held: bytearray, size: int) -> None:
    """Refuses one that more than one tensor makes large, as soon as enough of it is there.

    Args:
        held: what has arrived, with the number before it.

    Raises:
        Malformed: it is larger than buckets are.
    """
    first = 2 * LENGTH_BYTES  # the bucket's own length, and that of its head
    if size <= 2 * BUCKET_BYTES or len(held) < first:
        return
    length = int.from_bytes(held[LENGTH_BYTES:first], "little")
    if len(held) < first + min(length, _ONE_TENSOR):
        return
    if length > _ONE_TENSOR or len(_object(bytes(held[first : first + length])).keys() - {"__metadata__"}) != 1:
        raise Malformed(f"a bucket of {size} bytes holds more than one tensor: {BUCKET_BYTES} are sent at a time.")


def framed(data: bytes) -> bytes:
    """A bucket as it goes over the wire; none ends a push."""
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


# --- events -------------------------------------------------------------------------------------------------------


def event(kind: str, data: bytes = b"", **values: Any) -> bytes:
    """One line of JSON, and bytes behind it where there are any."""
    return json.dumps({"kind": kind, "bytes": len(data), **values}).encode() + b"\n" + data


def events(chunks: Iterable[bytes]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The events of an answer that arrives in pieces.

    Raises:
        Malformed: something else arrives, or it ends in the middle of an event.
    """
    arriving, held = iter(chunks), bytearray()

    def more() -> None:
        chunk = next(arriving, None)
        if chunk is None:
            raise Malformed("the answer broke off.")
        held.extend(chunk)

    for chunk in arriving:
        held.extend(chunk)
        while held:
            while (end := held.find(b"\n")) < 0:
                more()
            head = _object(bytes(held[:end]))
            size = head.get("bytes")
            if not isinstance(size, int) or size < 0 or not isinstance(head.get("kind"), str):
                raise Malformed("the answer is that of another server.")
            while len(held) < end + 1 + size:
                more()
            data = bytes(held[end + 1 : end + 1 + size])
            del held[: end + 1 + size]
            yield head, data


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Malformed("the answer is that of another server.")
    return value
