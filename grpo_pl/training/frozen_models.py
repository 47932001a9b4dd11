"""Frozen models that score the policy's samples: the reference of the KL term, and teachers to learn from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.distributed.sharding import (
    Sharding,
    build_once,
    frozen_copy,
    load_whole_state_dict,
    local_part,
    shard,
    whole_state_dict,
)
from grpo_pl.functional.logprobs import TaughtTokens
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import Teaching
from grpo_pl.policy.loading import context_length, load_model, load_tokenizer
from grpo_pl.policy.logprobs import Head
from grpo_pl.policy.lora import has_adapters
from grpo_pl.policy.packing import Rows
from grpo_pl.policy.teacher import PROMPTS_COMPARED, TeacherConfig, check_same_tokens
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.weights import is_sharded
from grpo_pl.training.collect import Collected
from grpo_pl.training.microbatches import Scorer, longest_segment
from grpo_pl.training.vocabulary import first_prompts
from grpo_pl.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EVERY_SOURCE = ""
"""The name of a teacher for all problems."""
Configs = Mapping[str, TeacherConfig]
"""Teachers by the part of a mixture that they teach, or one for ``EVERY_SOURCE``."""


class Reference:
    """The policy of an earlier moment, or an average of several; takes no gradient. Not a module: it stays out of
    ``.train()``. Of a policy with adapters it is no copy, but that policy, to be asked with its adapters off.

    Args:
        policy: copied as it is now.
        update_every: rollouts between two renewals (DeepSeekMath, arXiv:2402.03300, algorithm 1); None never renews.
        rate: share of the policy in a renewal, θ̄ ← (1 − rate) · θ̄ + rate · θ; 1 is a copy.
    """

    def __init__(self, policy: PreTrainedModel, update_every: int | None, rate: float = 1.0) -> None:
        self.update_every, self.rate = update_every, rate
        if not has_adapters(policy):
            self.model = frozen_copy(policy)  # which an earlier validation may have sharded
        elif update_every is None:
            self.model = policy  # scored with its adapters off
        else:
            raise ValueError(
                "a refreshed reference and an average of the policy as its teacher are copies of the policy, which "
                "policy.lora does without: set reference frozen and ref_update_every null, the teacher's weights "
                "start or live, or lora null."
            )

    @torch.no_grad()
    def renew(self, policy: PreTrainedModel, rollout: int) -> None:
        """Takes the policy's weights in if a renewal is due before rollout ``rollout``."""
        if self.update_every is None or rollout == 0 or rollout % self.update_every != 0:
            return
        if self.rate == 1.0:
            self.model.load_state_dict(policy.state_dict())  # both sharded, or neither
        else:
            for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
                local_part(mine).lerp_(local_part(theirs).to(mine.dtype), self.rate)

    def state_dict(self) -> dict[str, Any]:
        """Weights for a checkpoint: none where there is no renewal, for they are always the policy's start.

        Every process must call it; the first one gets the weights.
        """
        return {} if self.update_every is None else whole_state_dict(self.model)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Takes the weights of a checkpoint.

        Raises:
            ValueError: there are none of an average, which nothing could make up for.
        """
        if state:
            load_whole_state_dict(self.model, state)
        elif self.rate < 1.0:
            raise ValueError(
                "the checkpoint has no average of the policy as its teacher: resume with the teacher's weights of its "
                "run."
            )


def teacher_configs(teacher: TeacherConfig | None, teachers: Mapping[str, Any] | None) -> dict[str, TeacherConfig]:
    """``model.teacher`` and ``model.teachers`` as one."""
    if teacher is not None and teachers:
        raise ValueError("model.teacher is for all problems, model.teachers for those of each source: give one of two.")
    named = {name: TeacherConfig(**each) if isinstance(each, dict) else each for name, each in (teachers or {}).items()}
    return {EVERY_SOURCE: teacher} if teacher is not None else named


def check_teachers(configs: Configs, algorithm: GRPOAlgorithm, *, temperature: float) -> None:
    """Refuses an objective that has no teacher, or asks one for what it cannot give."""
    asked = algorithm.needs.teacher
    if asked is None:
        return
    if asked.of_itself:
        if configs:
            raise ValueError(
                f"the policy is its own teacher (weights {asked.weights}): set model.teacher and model.teachers null, "
                "or take the term Distillation."
            )
        return
    if not configs:
        raise ValueError(
            "the objective learns from a teacher (a term of model.algorithm.terms), and there is none: set "
            "model.teacher.path to a model of the hub, a folder or the export of a run."
        )
    served = [config for config in configs.values() if config.url is not None]
    if served and asked.whole:
        raise ValueError(
            f"a divergence needs the teacher's whole distributions, and the server {served[0].url} gives those of "
            "single tokens: set the term's divergence none."
        )
    if served and temperature != 1:
        raise ValueError(
            f"model.sampling.temperature is {temperature}, and the teacher behind {served[0].url} gives "
            "log-probabilities at temperature 1: set 1, or load the teacher here."
        )


def check_sources(configs: Configs, sources: Iterable[str]) -> None:
    """Refuses problems without a teacher, and teachers without problems."""
    names = set(sources)
    if EVERY_SOURCE not in configs and configs.keys() != names:
        told = ", ".join(sorted(names - {""})) or "none, as data.source is no mixture: set model.teacher"
        raise ValueError(f"model.teachers names {', '.join(sorted(configs))}; the parts of the mixture are {told}.")


def check_for_data(
    configs: Configs, data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase, template: PromptTemplate
) -> None:
    """Refuses teachers that lack a part of the data, or that would read other tokens than ``tokenizer`` writes."""
    check_sources(configs, data.source.leaves())
    asked = [problem.asked for problem in islice(first_prompts(data), PROMPTS_COMPARED)]
    for name, config in configs.items():
        called = f"the teacher {config.path!r}" + (f" of {name!r}" if name else "")
        check_same_tokens(tokenizer, load_tokenizer(config.model), template, asked, name=called)


@dataclass(frozen=True, kw_only=True)
class TeacherScores:
    """Scores of this rank's samples by their teachers; by default there is none."""

    owners: Sequence[str] = ()  # B, the name of each row's teacher
    logprobs: Tensor | None = None  # (B, T), of the policy's tokens
    taught: Tensor | None = None  # (B,) bool, the rows that have a teacher; None: all
    states: Sequence[Tensor] = ()  # B of (tokens, H') on the CPU: inputs of the head of the row's teacher
    heads: Mapping[str, Head] = field(default_factory=dict)  # where whole distributions are compared
    asked: Teaching = field(default_factory=Teaching)

    def tokens(self) -> dict[str, Tensor]:
        """What the loss is given of them."""
        found = {} if self.logprobs is None else {"teacher_logprobs": self.logprobs}
        return found if self.taught is None else {**found, "taught": self.taught.unsqueeze(1)}

    def heads_on(self, device: torch.device) -> TeacherScores:
        """The same with its heads, which a whole update uses, on a device."""
        moved = {
            name: Head(head.weight.to(device), None if head.bias is None else head.bias.to(device))
            for name, head in self.heads.items()
        }
        return replace(self, heads=moved)

    def distributions(self, rows: Tensor) -> TaughtTokens | None:
        """The distributions at the tokens of some rows, which share a teacher, for `update_scores`; None where
        log-probabilities suffice."""
        if not self.asked.whole:
            return None
        chosen = rows.tolist()
        weight, bias = self.heads[self.owners[chosen[0]]]
        hidden = torch.cat([self.states[row] for row in chosen]).to(weight.device)
        return TaughtTokens(hidden, weight, bias, self.asked.mix, self.asked.top_k)

    def split(self, rows: Tensor) -> list[Tensor]:
        """``rows`` by teacher, whose head a micro-batch has, in their order; all of them where there is no head."""
        if not self.asked.whole:
            return [rows]
        owned: dict[str, list[int]] = {}
        for row in rows.tolist():
            owned.setdefault(self.owners[row], []).append(row)
        return [rows.new_tensor(own) for own in owned.values()]


class Teachers:
    """The frozen teachers of a run. Not a module: they stay out of checkpoints, gradients and ``.train()``.

    Args:
        configs: by source.
        sharding: how FSDP2 shards the policy; their shards wait in CPU memory. None keeps each whole, in CPU memory as
            well, and moves it to the device while it is asked.
    """

    def __init__(self, configs: Configs, tokenizer: PreTrainedTokenizerBase, sharding: Sharding | None) -> None:
        self.configs = dict(configs)
        self._models: dict[str, PreTrainedModel] = {}
        loaded: dict[TeacherConfig, PreTrainedModel] = {}  # one model may teach several sources
        for name, config in configs.items():
            if config.url is not None:
                continue
            if config not in loaded:
                build = partial(load_model, config.model, tokenizer)
                model = (build() if sharding is None else build_once(build)).requires_grad_(False).eval()
                if sharding is not None:
                    shard(model, replace(sharding, cpu_offload=sharding.mesh.device_type != "cpu"))
                loaded[config] = model
            self._models[name] = loaded[config]

    def score(
        self, policy: PreTrainedModel, collected: Collected, algorithm: GRPOAlgorithm, scorer: Scorer
    ) -> TeacherScores:
        """This rank's samples under the teacher of each; all ranks call it."""
        samples, asked = collected.samples, algorithm.needs.teacher or Teaching()
        rollout, collective = samples.rollout, scorer.collective
        owners = [self._owner(problem.source) for problem in samples.per_row]
        logprobs = torch.zeros_like(rollout.sampling_logprobs)
        states, heads = [logprobs.new_empty(0)] * len(owners), dict[str, Head]()
        for name in sorted(self.configs):
            rows = torch.tensor([i for i, owner in enumerate(owners) if owner == name], dtype=torch.int64)
            rows = rows.to(logprobs.device)
            if not collective.any(len(rows) > 0, logprobs.device):
                continue
            if name not in self._models:
                ask = partial(_served, self.configs[name], rollout, rows)
                logprobs[rows] = collective.interruptible(ask, logprobs.device)
                continue
            longest = collective.max(longest_segment(rollout), logprobs.device)  # all ranks raise, or none
            _check_length(longest, self._models[name], self.configs[name])
            with _on_device(self._models[name], logprobs.device) as model:
                if asked.whole:
                    found, heads[name] = scorer.head_states(model, rollout, rows)
                    for row in rows.tolist():
                        states[row] = found[row]
                else:
                    logprobs += scorer.logprobs(model, rollout, rows, of_teacher=True)[0]
        if asked.whole:
            return TeacherScores(owners=owners, states=states, heads=heads, asked=asked)
        return TeacherScores(owners=owners, logprobs=logprobs)

    def _owner(self, source: str) -> str:
        return EVERY_SOURCE if EVERY_SOURCE in self.configs else source


@contextmanager
def _on_device(model: PreTrainedModel, device: torch.device) -> Iterator[PreTrainedModel]:
    """Context manager: within it a whole model is on the device, afterwards on the CPU; FSDP2 moves a sharded one."""
    if is_sharded(model):
        yield model
        return
    before: Any = model
    try:
        yield before.to(device)
    finally:
        before.to("cpu")


def _check_length(longest: int, model: PreTrainedModel, config: TeacherConfig) -> None:
    context = context_length(model.config)
    if context is not None and longest > context:
        raise ValueError(
            f"the teacher {config.path!r} reads {context} tokens, and a prompt with its completion has {longest}: "
            "lower model.sampling.max_completion_length, or take another teacher."
        )


def _served(config: TeacherConfig, rollout: Rollout, rows: Tensor) -> Tensor:
    """(rows, T) log-probabilities from a server."""
    from grpo_pl.extras.teachers.server import served_logprobs

    parts = Rows.of(rollout, rows).unfolded()
    found = torch.zeros(parts.completion_ids.shape, dtype=rollout.sampling_logprobs.dtype, device=rows.device)
    prompts = [ids[mask].tolist() for ids, mask in zip(parts.prompt_ids, parts.prompt_mask, strict=True)]
    written = [ids[mask].tolist() for ids, mask in zip(parts.completion_ids, parts.completion_mask, strict=True)]
    answers = served_logprobs(config, [prompt + own for prompt, own in zip(prompts, written, strict=True)])
    for row, (own, answer) in enumerate(zip(written, answers, strict=True)):
        found[row, : len(own)] = found.new_tensor(answer[len(answer) - len(own) :])
    mask = rollout.action_mask[rows]
    return torch.zeros(mask.shape, dtype=found.dtype, device=found.device).masked_scatter(mask, found[parts.scored])
