"""``RolloutEngine``: the contract between the pipeline and whatever draws completions.

The pipeline makes a `GenerateRequest`, asks ``generate`` for a `Rollout`, and calls ``update_weights`` after each
update. What decode loops share is in ``grpo_pl.rollout.decoding``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from grpo_pl.policy.loading import end_token_ids
from grpo_pl.types import GenerateRequest, PromptInputs, Rollout, SampleKey, SamplingParams, StopStrings, ThoughtEnd

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ProgressFn = Callable[[int, int], None]
"""Called as ``progress(tokens_drawn, completions_finished)`` now and then while an engine works."""


class Watching(TypedDict, total=False):
    """How a caller follows a rollout and ends it: keywords of `RolloutEngine.generate`, handed on by all in between."""

    progress: ProgressFn | None
    should_stop: Callable[[], bool] | None


def counting_on(watching: Watching, tokens: int, finished: int, *, ends: bool = True) -> Watching:
    """The same for a part of a rollout, whose progress goes on counting from here.

    Args:
        ends: false if no completion of the part counts as finished.
    """
    if (progress := watching.get("progress")) is None:
        return watching
    return {**watching, "progress": lambda more, done: progress(tokens + more, finished + done * ends)}


class RolloutEngine(ABC):
    """Draws completions from a policy: from its live weights, or from a copy of its own."""

    updates: int = 0
    """Updates that the policy has had, one a rollout, those before a resume included; the pipeline sets it."""
    supports_sampling_mask: bool = False
    """True if rollouts have their `Rollout.support` where ``SamplingParams.sampling_mask`` asks for it."""
    supports_top_logprobs: bool = False
    """True if rollouts have their `Rollout.top_ids` and ``top_logprobs`` where ``SamplingParams.top_logprobs`` asks for
    them."""
    supports_inputs: bool = False
    """True if it draws from prompts that hold more than tokens, `GenerateRequest.inputs`."""
    native: ClassVar[bool] = False
    """True if completions are drawn by a decoder of `NativeEngine`, which the pipeline chooses for all ranks."""
    copies_weights: ClassVar[bool] = False
    """True if it draws from a copy of the policy's weights."""
    weights_version: int | None = None
    """Of an engine that keeps a copy of the weights: the value of ``updates`` when it took them."""
    max_tokens: int | None = None
    """Most tokens of a prompt and its completion, if the engine sets a limit below the model's context."""
    memory_bytes: int | None = None
    """Memory of an engine with a process of its own, besides the weights; 0 for those on other hosts. None for one that
    keeps the keys and values of all rows while it draws."""

    @property
    def drawing_engine(self) -> RolloutEngine:
        """The engine whose code draws: this one, or the one that it runs elsewhere."""
        return self

    @abstractmethod
    def generate(
        self,
        model: PreTrainedModel,
        request: GenerateRequest,
        *,
        progress: ProgressFn | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Rollout:
        """Draws what ``request`` asks for. All ranks call it together.

        Args:
            model: the policy, on its device; its train/eval mode is the same before and after.
            progress: told how far the work is. It and ``should_stop`` belong to this call and not to the request, which
                is pickled for other processes, split among servers, and drawn again where one of them dies.
            should_stop: asked between tokens; once true, the call raises `RolloutInterrupted`.

        Raises:
            RolloutInterrupted: ``should_stop`` turned true.
            EngineDied: the engine draws in a process of its own, which ended.
        """

    def continuing(self, model: PreTrainedModel, *, rows: int) -> RolloutEngine:
        """An engine for the turns of episodes while the weights stay as they are: its ``generate`` gets whole contexts
        again and again, and may keep the keys and values of those that later ones begin with.

        Args:
            rows: most contexts at once.
        """
        return self

    def describe(self) -> str:
        """A few words for the log on what has drawn the completions so far."""
        return type(self).__name__

    def check(self) -> None:  # noqa: B027 - most engines need nothing
        """Called before a run costs anything; a ValueError says why the engine cannot work here and what to install."""

    def check_device(self, device: torch.device) -> None:  # noqa: B027 - most engines compute on any
        """Likewise for the device of the policy; a ValueError says what cannot be had there."""

    def prepare(self, model: PreTrainedModel) -> None:  # noqa: B027 - in-process engines need none
        """Called by all ranks together before each rollout, to gather the weights of a sharded policy."""

    def update_weights(self, model: PreTrainedModel) -> None:  # noqa: B027 - in-process engines read the live weights
        """Called once after each weight update: an engine with a copy must draw from the new weights next."""

    def rest(self) -> None:  # noqa: B027 - most engines keep nothing that the update could use
        """Called when the completions of a step are drawn, before it is scored and trained on: an engine may give
        memory back until it is asked again."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the engine, for a resumed run to draw in the same way."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most engines keep nothing
        """Takes over what `state_dict` has given."""

    def unclaimed_bytes(self, model: PreTrainedModel) -> int:
        """Bytes that the engine will take of the policy's GPU once it starts; 0 where it has, or takes none there."""
        return 0

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Called when a fit or a validation is over: ends what the engine has started; it starts anew if used again."""


class RolloutInterrupted(RuntimeError):
    """``should_stop`` turned true in the middle of a rollout; its completions are gone and must not be counted."""

    signal: Signals | None = None
    """The signal that asked this process to stop, if one did."""


class EngineDied(RuntimeError):
    """The process that an engine draws in has ended. The rollout can be drawn again: keys name its samples.

    Args:
        final: the engine has already tried again for long enough.
    """

    def __init__(self, message: str = "", *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class PolicyDiverged(ValueError):
    """The policy's logits are not finite: nothing can be drawn from it."""

    last_checkpoint: Path | None = None
    """The newest checkpoint of the run, if there is one."""

    def __str__(self) -> str:
        newest = self.last_checkpoint
        hint = f" The newest checkpoint is {newest}; start from one that was saved before the metrics went astray."
        return super().__str__() + (hint if newest is not None else "")


def generate_request(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_ids: Sequence[Sequence[int]],
    keys: Sequence[Sequence[SampleKey]],
    sampling: SamplingParams,
    prefix: str,
    thought: ThoughtEnd | None = None,
    inputs: Sequence[PromptInputs | None] | None = None,
) -> GenerateRequest:
    """A request with the end tokens that model, tokenizer and sampling parameters name.

    Args:
        prefix: text before the completions in which a stop string may begin.
        thought: the end of a thought, where there is a thinking budget.
        inputs: what the model reads beside the tokens of each prompt.
    """
    return GenerateRequest(
        prompt_ids=prompt_ids,
        keys=keys,
        sampling=sampling,
        eos_token_ids=end_token_ids(model, tokenizer, sampling),
        pad_token_id=int(tokenizer.pad_token_id),
        stops=StopStrings.of(sampling, tokenizer, prefix),
        thought=thought,
        inputs=inputs,
    )
