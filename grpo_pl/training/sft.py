"""Supervised fine-tuning on demonstrations: their tokens, the loss, the training of a cold start and its checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_pl.data.demonstrations import Demonstration
from grpo_pl.distributed.collective import Collective
from grpo_pl.files.checkpoints import CheckpointError, read_file, save_tensors
from grpo_pl.files.writing import best_effort
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.policy.tokenizer import end_of_text
from grpo_pl.rollout.decoding import pad_left
from grpo_pl.training.optimization import Optimization
from grpo_pl.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Optimizer = Literal["adamw", "muon"]
SAVE_EVERY_SECONDS = 60.0
"""Shortest time between two checkpoints."""
LARGEST_SHARE = 0.05
"""Most of the time that writing checkpoints may take."""
MUON_RATE = 3.0
"""Muon's rate as a multiple of AdamW's; see ``ColdStart.optimizer``."""


class StepReport(Protocol):
    """Called after every optimiser step."""

    def __call__(self, done: int, total: int, *, loss: float, lr: float) -> None: ...


class Example(NamedTuple):
    """A demonstration as tokens."""

    prompt: list[int]
    completion: list[int]
    """The completion with its EOS; of an episode all actions, and the observations between them."""
    written: list[bool]
    """True for the tokens of ``completion`` that the policy has to write."""


def tokenized(shown: Sequence[Demonstration], dialogue: Dialogue) -> list[Example]:
    """Demonstrations as the tokens that a rollout of their actions would have. The tokenizer is called twice for all
    of them, since a call costs more than the tokens of a short text."""
    prompts = dialogue.prompts_ids([each.question for each in shown])
    for number, each in enumerate(shown):
        if each.tools:  # an agent's
            offered = replace(dialogue, tools=each.tools, told_tools=each.told_tools)
            prompts[number] = offered.prompt_ids(each.question)
    texts = [[each.completion, *(action for _, action in each.further)] for each in shown]
    actions = iter(_actions_ids(list(chain.from_iterable(texts)), dialogue))
    found = []
    for prompt, demonstration in zip(prompts, shown, strict=True):
        tokens = next(actions)
        written = [True] * len(tokens)
        for observation, _ in demonstration.further:
            for ids, own in ((dialogue.observation_ids(observation, tokens[-1]), False), (next(actions), True)):
                tokens += ids
                written += [own] * len(ids)
        found.append(Example(prompt, tokens, written))
    return found


def _actions_ids(texts: Sequence[str], dialogue: Dialogue) -> list[list[int]]:
    prefill, tokenizer = dialogue.template.prefill, dialogue.tokenizer
    texts = [dialogue.template.without_opened_thought(text, tokenizer) for text in texts]
    if not all(text.startswith(prefill) for text in texts):
        raise ValueError(f"a demonstration does not begin with the template's prefill {prefill!r}.")
    ids = tokenizer([text[len(prefill) :] for text in texts], add_special_tokens=False).input_ids
    return [[*row, *end_of_text(tokenizer)] for row in ids]


def train_on_demonstrations(
    model: PreTrainedModel,
    batches: Iterator[list[Example]],
    *,
    steps: int,
    lr: float,
    pad_token_id: int,
    optimizer: Optimizer = "adamw",
    checkpoint: SFTCheckpoint | None = None,
    report: StepReport | None = None,
    collective: Collective = Collective(),  # noqa: B008 - frozen
) -> None:
    """Minimises the mean negative log-likelihood of the completion tokens, one step per batch, in place.

    Args:
        batches: those of the steps that ``checkpoint`` has not done, the same on all processes.
        checkpoint: state of an earlier process to go on from; saved now and then.
        collective: the processes that share each batch; all have the same weights before and after.
    """
    schedule = Optimization(lr=lr, warmup_rollouts=steps // 10, schedule="cosine", weight_decay=0.01)
    parts = _optimizers(model, schedule, optimizer)
    if checkpoint is not None:
        checkpoint.restore(model, [part for part, _ in parts])
    model.train()
    for step, batch in enumerate(batches, start=0 if checkpoint is None else checkpoint.steps_done):
        own, share = _own_share(batch, collective)
        loss = share * demonstration_loss(model, own, pad_token_id=pad_token_id)
        model.zero_grad(set_to_none=True)
        loss.backward()
        for weight in model.parameters():
            if weight.grad is not None:  # for the same weights on all processes
                weight.grad = collective.sum(weight.grad)
        schedule.clip_gradients(model.parameters())
        for part, factor in parts:
            for group in part.param_groups:
                group["lr"] = factor * schedule.lr_at(step, steps)
            part.step()
        if report is not None:
            report(step + 1, steps, loss=collective.sum(loss.detach()).item(), lr=schedule.lr_at(step, steps))
        if checkpoint is not None:
            checkpoint.save_if_due(model, [part for part, _ in parts], steps_done=step + 1)


def _own_share(batch: Sequence[Example], collective: Collective) -> tuple[Sequence[Example], float]:
    """This process's examples of a batch, and their share of its tokens to be written; where there are none, one that
    does not count, so that the same weights have gradients everywhere."""
    own = batch[collective.rank :: collective.world]
    if not own:
        return batch[:1], 0.0
    ours, all_of_them = (sum(sum(each.written) for each in some) for some in (own, batch))
    return own, ours / all_of_them


class SFTCheckpoint:
    """Keeps weights and optimisers of a supervised training that is under way, so that a later process continues it to
    the same last bit.

    Args:
        path: the file. Processes that do the same work at the same time may share it, for all write equal states.
        collective: processes that go on together, and begin again where their files differ, as those of two machines.
        writes: whether this process saves.
    """

    def __init__(self, path: Path, collective: Collective = Collective(), *, writes: bool = True) -> None:  # noqa: B008
        self.path, self.writes = path, writes
        self._due_at = time.monotonic() + SAVE_EVERY_SECONDS
        self._state = None
        if path.exists():
            try:
                self._state = read_file(path)
            except CheckpointError:  # of a disk that failed: begin again
                path.unlink(missing_ok=True)
        self.steps_done = 0 if self._state is None else int(self._state["steps_done"])
        """Optimiser steps of the process before."""
        if len(set(collective.gather_objects(self.steps_done))) > 1:
            self._state, self.steps_done = None, 0

    def restore(self, model: PreTrainedModel, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Takes up the state of the process before, if there was one."""
        if self._state is None:
            return
        model.load_state_dict(self._state["state_dict"])
        for optimizer, state in zip(optimizers, self._state["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._state = None  # or it would take its memory for the whole training

    def save_if_due(
        self, model: PreTrainedModel, optimizers: Sequence[torch.optim.Optimizer], *, steps_done: int
    ) -> None:
        """Writes the state after a step, unless it was written a short while ago; a full disk only warns."""
        if not self.writes or (begun := time.monotonic()) < self._due_at:
            return
        state = {
            "steps_done": steps_done,
            "state_dict": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        with best_effort(self.path):
            save_tensors(state, self.path, shared=True)
        now = time.monotonic()
        self._due_at = now + max(SAVE_EVERY_SECONDS, (now - begun) / LARGEST_SHARE)

    def remove(self) -> None:
        """Deletes the file, once the result is there."""
        self.path.unlink(missing_ok=True)


def _optimizers(
    model: PreTrainedModel, schedule: Optimization, kind: Optimizer
) -> list[tuple[torch.optim.Optimizer, float]]:
    """The optimisers of all weights, each with what its rate is of the schedule's."""
    if kind == "adamw":
        return [(schedule.build(model.parameters()), 1.0)]
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    inner = [weight for weight in trained if weight.ndim == 2 and id(weight) not in ends]
    among = {id(weight) for weight in inner}
    rest = [weight for weight in trained if id(weight) not in among]
    muon = torch.optim.Muon(inner, lr=schedule.peak, weight_decay=schedule.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [(muon, MUON_RATE), (schedule.build(rest), 1.0)]


def as_rollout(examples: Sequence[Example], *, pad_token_id: int) -> Rollout:
    """Examples as an engine would have given them, whose actions the policy is to write."""
    prompt_ids, prompt_mask = pad_left([each.prompt for each in examples], pad_token_id)  # (B, S)
    ids = [torch.tensor(each.completion) for each in examples]
    completion_ids = pad_sequence(ids, batch_first=True, padding_value=pad_token_id)  # (B, T)
    return Rollout(
        group_size=1,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in ids], batch_first=True),
        sampling_logprobs=torch.zeros(completion_ids.shape),
        finish_reasons=["stop" for _ in examples],
        action_mask=pad_sequence([torch.tensor(each.written) for each in examples], batch_first=True),
    )


def demonstration_loss(model: PreTrainedModel, batch: Sequence[Example], *, pad_token_id: int) -> Tensor:
    """−Σ log π(token) / number of tokens, over the tokens of the batch that the policy is to write; a scalar."""
    logprobs, written = demonstration_logprobs(model, batch, pad_token_id=pad_token_id)
    return -(logprobs * written).sum() / written.sum()


def demonstration_logprobs(
    model: PreTrainedModel, batch: Sequence[Example], *, pad_token_id: int
) -> tuple[Tensor, Tensor]:
    """log π of the tokens of completions, and a mask of those that the policy is to write; both (B, T)."""
    device = model.device
    prompt_ids, prompt_mask = pad_left([each.prompt for each in batch], pad_token_id)  # (B, S)
    ids, own = [torch.tensor(each.completion) for each in batch], [torch.tensor(each.written) for each in batch]
    completion_ids = pad_sequence(ids, batch_first=True, padding_value=pad_token_id).to(device)  # (B, T)
    completion_mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in ids], batch_first=True).to(device)
    written = pad_sequence(own, batch_first=True).to(device)  # (B, T) bool
    logprobs, _ = completion_logprobs(
        model,
        prompt_ids=prompt_ids.to(device),
        prompt_mask=prompt_mask.to(device),
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        temperature=1.0,
    )
    return logprobs, written
