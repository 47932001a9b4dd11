"""The values that flow through the pipeline, and the legend of tensor axes.

Axes, used in every trailing shape comment:

    P  prompts in the batch            S  prompt tokens, left-padded
    G  completions per prompt          T  completion tokens, right-padded
    B  = P * G completions             V  vocabulary

Completions of one prompt are neighbours: row ``p * G + g`` is sample ``g`` of prompt ``p``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

if TYPE_CHECKING:  # rewards are scored without torch
    import torch
    from torch import Tensor

Split = Literal["train", "val", "predict"]
"""The set of problems: those of training, held-out ones, or those of a user."""
Draw = Literal["sampled", "greedy"]
"""The way tokens are drawn: each by a race with keyed noise, or each the most likely one."""
FinishReason = Literal[
    "stop",  # the policy ended the completion itself
    "length",  # it has as many tokens as a completion may have
    "turns",  # an episode has had as many turns as it may have
    "tokens",  # an episode has as many tokens as it may have, or as the model's context holds
    "environment",  # the environment ended the episode, by its own rules or because something in it went wrong
]
CUT_OFF: frozenset[FinishReason] = frozenset({"length", "turns", "tokens"})
"""Reasons that are limits: the policy might have gone on."""
NO_TURN = -1
"""Turn of tokens that the policy did not write, and padding behind an episode's last turn."""
NO_VERSION = -1
"""Version of the policy at tokens that it did not write."""
NO_TOKEN = -1
"""Padding id after the kept tokens, where another position has more of them."""
Message = Mapping[str, Any]
"""One turn of a conversation: ``role`` (system, user, assistant) and ``content``: a text, or of a problem with images
the parts ``{"type": "text", "text": …}`` and ``{"type": "image"}``; the images are ``Problem.columns["images"]``."""
Conversation = tuple[Message, ...]
"""Turns of which the last is the user's; a system message may come first."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem. Rewards see ``answer`` and ``columns``, the policy sees only ``question``."""

    id: int
    """Stable identity inside its source; part of the sampling key."""
    question: str
    """The question as text; of a conversation of one turn that turn, of a longer one all turns but the system's."""
    answer: str
    """The gold answer, as plain text or LaTeX, without ``\\boxed``; empty where the data set has none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the data set, handed to rewards by name."""
    source: str = ""
    """Name of the part of a mixture that the problem comes from; rewards and metrics may go by it."""
    messages: Conversation | None = None
    """The conversation itself, where the data set asks with one; rewards find it in the column ``prompt_messages``."""

    @property
    def asked(self) -> str | Conversation:
        """The input of a template: the conversation, or the question."""
        return self.question if self.messages is None else self.messages


@dataclass(frozen=True, kw_only=True)
class SampleKey:
    """Names one completion. With the weights it determines every token drawn (see ``functional.sampling``)."""

    seed: int
    split: Split
    step: int
    """Rollout step that asked for the sample; 0 outside training."""
    attempt: int
    """0 at first; dynamic sampling counts up."""
    prompt_id: int
    sample: int
    """0 … G-1 inside the group."""
    draw: Draw = "sampled"
    """A greedy completion needs no noise; this tells it from the sample of that number."""
    turn: int = 0
    """Number of the action in its episode, so that each can be drawn again from its context alone; in later segments a
    hash of the segment's prompt and the number."""
    drawn: int = 0
    """Tokens of the completion that were drawn before and stand in the context now; the others follow as if it had
    never been cut."""


@dataclass(frozen=True, kw_only=True)
class PromptInputs:
    """What a model reads of one prompt beside its tokens, such as pixels."""

    key: str
    """Names the content: inputs with one key are equal."""
    tensors: Mapping[str, Tensor]
    """By the model's own names, on the CPU."""


@dataclass(frozen=True)
class RowInputs:
    """What the model reads beside the tokens of each row's prompt; None where that is nothing. Rows are taken as those
    of a tensor are, so that none parts from its own."""

    of: Sequence[PromptInputs | None]  # B

    def __getitem__(self, rows: Tensor) -> RowInputs:
        numbers = rows.tolist()
        assert not any(isinstance(number, bool) for number in numbers), "rows are taken by their numbers"
        return RowInputs([self.of[number] for number in numbers])

    @property
    def keys(self) -> list[str | None]:
        """Equal for rows whose prompts have equal inputs."""
        return [None if each is None else each.key for each in self.of]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Output of an engine: completions as tokens, with the log-probabilities they were drawn with.

    An episode of many turns is one row: prompt, then action, observation, action, … A completion of a single turn is
    all action. An agent that begins further conversations in its episode adds segments to the row, one behind the
    other: the prompt of each, and what follows it. Only the model reads them apart (``policy.packing.Rows``); whatever
    counts completions counts the row once.
    """

    group_size: int
    prompt_ids: Tensor  # (B, S) int64, left-padded
    prompt_mask: Tensor  # (B, S) bool
    completion_ids: Tensor  # (B, T) int64, right-padded
    completion_mask: Tensor  # (B, T) bool: the tokens that exist; of a single turn all up to the first EOS, inclusive
    sampling_logprobs: Tensor  # (B, T) float32, 0 where the policy wrote nothing
    finish_reasons: Sequence[FinishReason]  # B
    action_mask: Tensor = None  # type: ignore[assignment]  # (B, T) bool: what the policy wrote; by default all there is
    turn_index: Tensor = None  # type: ignore[assignment]  # (B, T) int64: which action; NO_TURN outside; by default 0
    segment_index: Tensor = None  # type: ignore[assignment]  # (B, T) int64: k in segment k, -k in its prompt where k is
    # above 0; by default 0, as in padding
    policy_version: Tensor = None  # type: ignore[assignment]  # (B, T) int64: updates that the policy had had when each
    # token was drawn, one a rollout; NO_VERSION where it wrote nothing; by default 0, `CompletionSampler` fills it in
    support: Tensor | None = None  # (B, T, K) int32: the tokens that truncation left at each place, NO_TOKEN behind
    # them; with `SamplingParams.sampling_mask`
    top_ids: Tensor | None = None  # (B, T, K) int32: the tokens that were likeliest at each place, the first one most;
    # NO_TOKEN where there are fewer, or the policy wrote nothing; with `SamplingParams.top_logprobs`
    top_logprobs: Tensor | None = None  # (B, T, K) float32: theirs, as those of what was drawn; −inf for NO_TOKEN
    thoughts: Tensor | None = None  # (B, 1, 2) int32: tokens of the thought that the policy wrote, and their budget;
    # with `SamplingParams.thinking_budget`
    inputs: RowInputs | None = None  # B; None where every prompt is tokens alone

    def __post_init__(self) -> None:
        if self.action_mask is None:
            object.__setattr__(self, "action_mask", self.completion_mask)
        if self.turn_index is None:
            object.__setattr__(self, "turn_index", self._zero_where_written(NO_TURN))
        if self.segment_index is None:
            object.__setattr__(self, "segment_index", self.completion_ids.new_zeros(self.completion_ids.shape))
        if self.policy_version is None:
            object.__setattr__(self, "policy_version", self._zero_where_written(NO_VERSION))

    def _zero_where_written(self, elsewhere: int) -> Tensor:
        return self.completion_ids.new_full(self.completion_ids.shape, elsewhere).masked_fill(self.action_mask, 0)

    def to(self, device: torch.device | str) -> Rollout:
        """The same rollout with its tensors on ``device``."""
        moved: dict[str, Any] = {name: t.to(device) for name, t in vars(self).items() if hasattr(t, "device")}
        return replace(self, **moved)

    @property
    def observation_mask(self) -> Tensor:
        """What neither the policy wrote nor is a segment's prompt, shape (B, T) bool."""
        return self.completion_mask & ~self.action_mask & (self.segment_index >= 0)

    @property
    def lengths(self) -> Tensor:
        """Completion tokens per row, observations and prompts of segments among them, shape (B,)."""
        return self.completion_mask.sum(dim=1)

    @property
    def action_lengths(self) -> Tensor:
        """Tokens per row that the policy wrote, shape (B,)."""
        return self.action_mask.sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters."""

    max_completion_length: int = 256
    """Most tokens a completion may have; longer ones end with ``finish_reason="length"``."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in every log-probability; 0 is greedy and refused for training."""
    top_k: int = 0
    """Draw among the k most likely tokens only; 0 is off. For training it needs ``sampling_mask``."""
    top_p: float = 1.0
    """Draw from the smallest set with this much mass; 1 is off. For training it needs ``sampling_mask``."""
    sampling_mask: bool = False
    """Train with ``top_k`` or ``top_p``: what they leave at each place is recorded with the completion, and every
    log-probability of the loss, of the reference and of the entropy is renormalised over it (DeepSeek-V3.2,
    arXiv:2512.02556, "Keep Sampling Mask")."""
    top_logprobs: int = 0
    """The engine records this many of the likeliest tokens of each place with their log-probabilities. A run sets it
    itself if the objective needs them."""
    thinking_budget: int | tuple[int, int] | None = None
    """Most tokens of a thought; a thought that has so many without its end gets ``template.thought_end`` fed, which is
    no part of the loss. Two numbers: each completion draws its own between them, by its key. Null is no budget."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion like an EOS: the token that completes one is its last and belongs to it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion besides the model's own EOS, and belong to it."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):  # as YAML and JSON give them back
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str | int) else tuple(given or ()))
        if isinstance(self.thinking_budget, list):
            object.__setattr__(self, "thinking_budget", tuple(self.thinking_budget))
        if (budget := self.thinking_budget) is not None:
            low, high = budget if isinstance(budget, tuple) else (budget, budget)
            if not 1 <= low <= high:
                raise ValueError(f"thinking_budget must be at least 1, or two such numbers in order, got {budget}.")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(f"stop must hold texts of one character or more, got {list(self.stop)}.")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must not be negative, got {list(self.stop_token_ids)}.")
        if self.max_completion_length < 1:
            raise ValueError(f"max_completion_length must be at least 1, got {self.max_completion_length}.")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}.")
        if self.top_logprobs < 0:
            raise ValueError(f"top_logprobs must be 0 (off) or more, got {self.top_logprobs}.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}.")

    def require_on_policy(self) -> None:
        """Refuses what would make the drawn distribution differ from the one that the loss differentiates."""
        if self.temperature == 0.0:
            raise ValueError("temperature is 0: greedy completions of a group are all equal, so nothing can be learnt.")
        truncated = self.top_k > 0 or self.top_p < 1.0
        if truncated and not self.sampling_mask:
            raise ValueError(
                f"top_k={self.top_k}, top_p={self.top_p}: truncated sampling biases the training loss. "
                "Set sampling_mask true, or top_k=0 and top_p=1 for training; evaluation may truncate."
            )
        if self.sampling_mask and not truncated:
            raise ValueError("sampling_mask is true, and nothing is truncated: set top_k or top_p, or it to false.")


class Tokenizer(Protocol):
    """The methods of a tokenizer that `StopStrings` and `ThoughtEnd` use; those of transformers have them."""

    @property
    def all_special_tokens(self) -> list[str]: ...

    def convert_tokens_to_ids(self, tokens: str) -> int: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True, kw_only=True)
class StopStrings:
    """Texts that end a completion, with the tokenizer and prefix that are needed to find them in its tokens."""

    texts: tuple[str, ...]
    tokenizer: Tokenizer
    prefix: str = ""
    """Prefilled text before a completion; a stop string may begin in it."""

    @classmethod
    def of(cls, sampling: SamplingParams, tokenizer: Tokenizer, prefix: str) -> Self | None:
        """The stop strings of ``sampling``; None if it has none.

        Raises:
            ValueError: one is the name of a special token, which decoding leaves out of the text.
        """
        if not sampling.stop:
            return None
        special = next((text for text in sampling.stop if text in tokenizer.all_special_tokens), None)
        if special is not None:
            number = tokenizer.convert_tokens_to_ids(special)
            raise ValueError(f"sampling.stop: {special!r} is a special token: set stop_token_ids: [{number}] instead.")
        return cls(texts=sampling.stop, tokenizer=tokenizer, prefix=prefix)


@dataclass(frozen=True, kw_only=True)
class ThoughtEnd:
    """The text that ends a thought, and the tokens that are fed where a budget ends it."""

    marker: str
    """A thought is over once its text contains this."""
    tokens: tuple[int, ...]
    """Of a text that contains the marker."""
    tokenizer: Tokenizer
    prefix: str = ""
    """Prefilled text before a completion; with the marker in it, there is no thought."""

    def length(self, tokens: Sequence[int]) -> int | None:
        """Number of tokens up to the one that completes the marker; None if it is not there."""
        if self.marker in self.prefix:
            return 0
        if not self._over(tokens):
            return None
        return bisect_left(range(len(tokens)), True, lo=1, key=lambda length: self._over(tokens[:length]))

    def _over(self, tokens: Sequence[int]) -> bool:
        return self.marker in self.prefix + self.tokenizer.decode(list(tokens), skip_special_tokens=False)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A request to an engine: the same number of completions for each of P prompts.

    It holds values only, so that it goes to other processes as it is; sequences become tuples.

    Raises:
        ValueError: no prompts, an empty prompt, or groups of unequal size.
    """

    prompt_ids: Sequence[Sequence[int]]
    """P token lists of any lengths, not padded."""
    keys: Sequence[Sequence[SampleKey]]
    """(P, G) names of the samples; equal keys and weights give equal tokens."""
    sampling: SamplingParams
    eos_token_ids: Sequence[int]
    """Any of these ends a completion and belongs to it; may be empty."""
    pad_token_id: int
    """Fills what is masked; may be one of ``eos_token_ids``."""
    stops: StopStrings | None = None
    """The strings of ``sampling.stop``, given only where there are some; a completion ends with the token that
    completes one, by ``stop``."""
    thought: ThoughtEnd | None = None
    """Given with ``sampling.thinking_budget``, which `draw_completions` keeps to; engines get requests without."""
    limits: Sequence[Sequence[int]] | None = None
    """(P, G) most tokens of each completion; by default, and at most, ``sampling.max_completion_length``."""
    inputs: Sequence[PromptInputs | None] | None = None
    """P, what the model reads beside the tokens of each prompt; None where every prompt is tokens alone."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", tuple(map(tuple, self.prompt_ids)))
        object.__setattr__(self, "keys", tuple(map(tuple, self.keys)))
        object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        if self.limits is not None:
            object.__setattr__(self, "limits", tuple(map(tuple, self.limits)))
        if self.inputs is not None:
            given = tuple(self.inputs)
            assert len(given) == len(self.prompt_ids), "one entry a prompt"
            object.__setattr__(self, "inputs", given if any(each is not None for each in given) else None)
        if not self.prompt_ids or len(self.prompt_ids) != len(self.keys):
            raise ValueError(
                f"{len(self.prompt_ids)} prompts for {len(self.keys)} groups of keys: give one group per prompt."
            )
        if not all(self.prompt_ids):
            raise ValueError("a prompt has no tokens: the policy needs at least one to start from.")
        sizes = {len(group) for group in self.keys}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(f"groups must have one common size of at least 1, got sizes {sorted(sizes)}.")

    @property
    def group_size(self) -> int:
        """G, the completions of each prompt."""
        return len(self.keys[0])

    @property
    def row_inputs(self) -> RowInputs | None:
        """`Rollout.inputs` of the rows that are asked for."""
        if self.inputs is None:
            return None
        return RowInputs([each for each in self.inputs for _ in range(self.group_size)])

    @property
    def row_limits(self) -> list[int]:
        """(B,) most tokens of each completion."""
        if self.limits is None:
            return [self.sampling.max_completion_length] * (len(self.keys) * self.group_size)
        return [min(limit, self.sampling.max_completion_length) for group in self.limits for limit in group]

    def split(self, parts: int) -> list[Self]:
        """Consecutive prompts, at most one more in one part than in another; none of the parts is empty."""
        prompts = len(self.prompt_ids)
        ends = sorted({prompts * number // parts for number in range(parts + 1)})
        return [
            replace(
                self,
                prompt_ids=self.prompt_ids[a:b],
                keys=self.keys[a:b],
                limits=None if self.limits is None else self.limits[a:b],
                inputs=None if self.inputs is None else self.inputs[a:b],
            )
            for a, b in pairwise(ends)
        ]


class PromptBatch:
    """The prompts of one rank for one rollout step (training) or one slice of the held-out problems.

    A plain class, because Lightning takes tuples and dataclasses apart to move their tensors, and refuses frozen ones.

    Args:
        step: the rollout step, or the number of the slice.
        prompts: this rank's prompts.
        valid: false for prompts that only fill a rank's slice up to the common size, so that all ranks do equal work.
        groups: names of the groups that each held-out prompt counts in, such as ``("val", "val/algebra")``.
    """

    def __init__(
        self, *, step: int, prompts: Sequence[Problem], valid: Sequence[bool], groups: Sequence[Sequence[str]] = ()
    ) -> None:
        self.step, self.prompts, self.valid = step, tuple(prompts), tuple(valid)
        self.groups = tuple(map(tuple, groups))
