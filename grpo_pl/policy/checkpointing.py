"""Activation checkpointing in which the second pass of a layer computes as its first one did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from grpo_pl.policy.library_internals import checkpoint_contexts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakeContext = Callable[[], AbstractContextManager[Any]]
_REPEATED: ContextVar[tuple[MakeContext, ...]] = ContextVar("contexts of a first pass", default=())


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Has ``model`` compute the activations of its layers again in the backward pass instead of keeping them (Chen et
    al., "Training deep nets with sublinear memory cost", arXiv:1604.06174), within the contexts of `repeated`."""
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": _of_both_passes}
    )


def recomputes_activations(model: PreTrainedModel) -> bool:
    """True if the backward pass computes activations again instead of keeping them."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules()) and model.training


def recomputes_as_it_stands(model: PreTrainedModel) -> bool:
    """True if it does so outside of the contexts of the first pass, as somebody else than us has set it up."""
    return recomputes_activations(model) and checkpoint_contexts(model) != {_of_both_passes}


@contextmanager
def repeated(*make: MakeContext) -> Iterator[None]:
    """Enters contexts, which layers within it enter again when they compute again in the backward pass."""
    token = _REPEATED.set((*_REPEATED.get(), *make))
    try:
        with _entered(make):
            yield
    finally:
        _REPEATED.reset(token)


def _of_both_passes() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What ``torch.utils.checkpoint`` enters for a layer's first pass, and for its second in whatever thread."""
    return nullcontext(), _entered(_REPEATED.get())


@contextmanager
def _entered(make: tuple[MakeContext, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in make:
            stack.enter_context(each())
        yield
