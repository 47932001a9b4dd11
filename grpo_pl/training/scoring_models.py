"""``ScoringModels``: the models beside the policy that score its samples in a run: reference, teachers, itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grpo_pl.distributed.sharding import Sharding, shard
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.logprobs import use_forward_mode
from grpo_pl.policy.privileged import PrivilegedText
from grpo_pl.policy.weights import is_sharded
from grpo_pl.rollout.sampler import CompletionSampler
from grpo_pl.training.frozen_models import Reference, Teachers
from grpo_pl.training.self_teacher import SelfTeacher

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(kw_only=True)
class ScoringModels:
    """What an objective asks for of a reference, teachers, and the policy as its own teacher; None before a fit."""

    reference: Reference | None = None
    teachers: Teachers | None = None
    self_teacher: SelfTeacher | None = None

    def copy_policy(
        self,
        policy: PreTrainedModel,
        algorithm: GRPOAlgorithm,
        privileged: PrivilegedText | None,
        sampler: CompletionSampler,
    ) -> None:
        """Makes the copies of the policy that the objective asks for, and that an earlier fit has not made."""
        needs = algorithm.needs
        if needs.loads_reference and self.reference is None:
            self.reference = Reference(policy, algorithm.ref_update_every)
        if privileged is not None and needs.teacher is not None and self.self_teacher is None:
            weights, rate = needs.teacher.weights, needs.teacher.rate
            self.self_teacher = SelfTeacher(
                policy, weights=weights, rate=rate, text=privileged, dialogue=sampler.dialogue
            )

    @property
    def _copies(self) -> dict[str, Reference]:
        """What is made of the policy, by its name in checkpoints."""
        own = None if self.self_teacher is None else self.self_teacher.copy
        made = {"reference": self.reference, "self_teacher": own}
        return {name: each for name, each in made.items() if each is not None}

    @property
    def _whole(self) -> list[PreTrainedModel]:
        """Copies that are not sharded; with adapters the policy itself may be among them."""
        return [each.model for each in self._copies.values() if not is_sharded(each.model)]

    @property
    def teacher(self) -> Teachers | SelfTeacher | None:
        """What the policy learns from besides rewards."""
        return self.teachers or self.self_teacher

    def shard(self, sharding: Sharding) -> None:
        """Shards the copies that are whole."""
        for model in self._whole:
            shard(model, sharding)

    def move_to(self, device: torch.device, dtype: torch.dtype) -> None:
        """Moves the copies that are whole to the policy's device and type, which ``trainer.precision`` may change."""
        for model in self._whole:
            model.to(device)
            if model.dtype != dtype:
                model.to(dtype)

    def renew(self, policy: PreTrainedModel, rollout: int) -> None:
        """Brings reference and average up to date before a rollout, where that is due."""
        for each in self._copies.values():
            each.renew(policy, rollout)

    def state_dict(self) -> dict[str, Any]:
        """Entries of a checkpoint. Every process must call it; the first one gets the weights."""
        none: dict[str, Any] = {"reference": {}, "self_teacher": {}}
        return none | {name: each.state_dict() for name, each in self._copies.items()}

    def load_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes the entries of a checkpoint."""
        for name, each in self._copies.items():
            each.load_state_dict(checkpoint.get(name) or {})
            use_forward_mode(each.model, checkpoint.get("forward_mode"))  # found when its weights were the policy's
