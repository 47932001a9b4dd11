"""``GRPOModule``: the LightningModule that wires prompts → rollout → reward → advantage → loss → update."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.distributed.orphans import end_with_launcher
from grpo_pl.distributed.sharding import shard
from grpo_pl.distributed.strategy import FSDP2Strategy, joining_gradients
from grpo_pl.environment import Environment
from grpo_pl.evaluation.held_out import Validation
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.states import TermStates
from grpo_pl.policy.checkpointing import checkpoint_activations
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.dropout import switch_noise_off
from grpo_pl.policy.loading import PolicyConfig, load_tokenizer
from grpo_pl.policy.privileged import PrivilegedText
from grpo_pl.policy.teacher import TeacherConfig
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.weights import is_sharded
from grpo_pl.processes.malloc import keep_freed_memory
from grpo_pl.rewards.base import Reward
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.training import checks
from grpo_pl.training.cold_start import ColdStart
from grpo_pl.training.cold_start_fit import make_start
from grpo_pl.training.defaults import Derived, derive, run_facts, unset_fields, with_values
from grpo_pl.training.demonstrated import DemonstrationBatches
from grpo_pl.training.experience import Experience, ExperienceMaker
from grpo_pl.training.frozen_models import Teachers, check_for_data, teacher_configs
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.metrics import REFLECTION_WORDS, StepLog, without_value
from grpo_pl.training.microbatches import TokenBudget
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.partial_rollouts import PartialRollouts
from grpo_pl.training.policy_module import PolicyModule
from grpo_pl.training.scoring_models import ScoringModels
from grpo_pl.training.source import RolloutSource, SourceRun, SynchronousRollouts
from grpo_pl.training.source_choice import rollout_source
from grpo_pl.training.update import PolicyUpdate, UpdateResult
from grpo_pl.training.vocabulary import first_prompts
from grpo_pl.training.weight_sync import WeightSyncCheck
from grpo_pl.types import PromptBatch, SamplingParams


class GRPOModule(PolicyModule):
    """Trains a policy by GRPO or a relative; one training batch is one rollout and its updates.

    Args:
        policy: the language model to train.
        rewards: score completions; at most one of them decides what a right answer is (``correctness: true``). Without
            one, held-out problems are measured by the rewards themselves.
        template: how a question becomes a prompt.
        algorithm: the objective.
        teacher: a frozen model whose distributions the policy learns from, where the objective asks for one.
        teachers: one for each part of a mixture instead, by name.
        privileged: what the policy reads besides the question where it is its own teacher.
        demonstrations: demonstrations to learn from beside the rollouts, where the objective asks for them.
        environment: what the policy acts in, turn by turn; null asks for completions of a single turn.
        episodes: limits of the episodes that are played in the environment.
        engine: what draws completions; null takes the native engine.
        sampling: length, temperature and ends of training completions.
        partial_rollouts: draws long completions over several steps; null draws every one to its end.
        optimization: AdamW, learning-rate schedule, clipping; a subclass's own `configure_optimizers` leaves it the
            clipping.
        validation: how held-out problems are answered.
        cold_start: supervised fine-tuning before RL, made once and cached; null starts from the policy as it is.
        max_tokens_per_microbatch: most tokens per forward and backward pass, a group's prompt counted once; null finds
            what fits into memory.
        activation_checkpointing: compute activations again in the backward pass instead of keeping them.
        reflection_words: completions with one of these count in ``completions/reflection_rate``.
        seed: part of the key of every sample; with weights and configuration it determines the run. Lightning's
            ``seed_everything`` changes nothing, but for that option of the command line, which sets this one.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        rewards: list[Reward],
        template: PromptTemplate = PromptTemplate(),  # noqa: B008 - frozen
        algorithm: GRPOAlgorithm = GRPOAlgorithm(),  # noqa: B008 - frozen
        teacher: TeacherConfig | None = None,
        teachers: dict[str, TeacherConfig] | None = None,
        privileged: PrivilegedText | None = None,
        demonstrations: DemonstrationBatches | None = None,
        environment: Environment | None = None,
        episodes: EpisodeSettings = EpisodeSettings(),  # noqa: B008 - frozen
        engine: RolloutEngine | None = None,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
        partial_rollouts: PartialRollouts | None = None,
        optimization: Optimization = Optimization(),  # noqa: B008 - frozen
        validation: Validation = Validation(),  # noqa: B008 - frozen
        cold_start: ColdStart | None = None,
        max_tokens_per_microbatch: int | None = None,
        activation_checkpointing: bool = False,
        reflection_words: tuple[str, ...] = REFLECTION_WORDS,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.policy_config, self.template, self.rewards = policy, template, rewards
        self.algorithm, self.sampling, self.validation = algorithm, sampling, validation
        self.engine, self.cold_start, self.seed = engine or NativeEngine(), cold_start, seed
        self.environment, self.episodes, self.demonstrations = environment, episodes, demonstrations
        self.automatic_optimization = False
        self.optimization, self.activation_checkpointing = optimization, activation_checkpointing
        self.teacher_configs = teacher_configs(teacher, teachers)
        """By source; used where the objective asks for a teacher."""
        self.privileged = privileged
        checks.check_parts(
            self,
            teachers=self.teacher_configs,
            privileged=privileged,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
        )
        self.sampling = replace(sampling, top_logprobs=algorithm.needs.top_logprobs)
        self.budget = TokenBudget(configured=max_tokens_per_microbatch)
        self.pool = self._pool_of(environment, episodes)
        self._default_engine = self.engine if engine is None else None
        self.configured_algorithm = algorithm
        """The objective as it was given, before a fit chose what it left open."""
        self._scoring, self._weight_sync = ScoringModels(), WeightSyncCheck()
        self.partial_rollouts = partial_rollouts
        self.source: RolloutSource = SynchronousRollouts()
        """Where completions come from; chosen again for each fit."""
        self._step_log = StepLog(rewards, reflection_words)
        self._term_states = TermStates()

    # --- building ---------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        checks.check_data(self.trainer)  # in every process
        checks.check_trainer(self.trainer)
        end_with_launcher()
        self.engine.close()  # a copy of weights that it kept would be that of an earlier fit
        self._weight_sync = WeightSyncCheck()
        if stage == "fit":
            if self.trainer.strategy.root_device.type == "cpu":
                keep_freed_memory()
            self.choose_source(self._data)
            checks.check_averaging(self)
            if self.trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning would count optimizer steps as well
                self.trainer.fit_loop.epoch_loop.max_steps = -1
            self._data.repeat_rollouts(self.trainer.overfit_batches)  # type: ignore[attr-defined]
            if self._data.repeated is not None:  # Lightning would end after them, and validate on as few
                self.trainer.limit_train_batches = self.trainer.limit_val_batches = 1.0
        self._make_start()

    def teardown(self, stage: str) -> None:
        self.source.close()
        super().teardown(stage)

    def derive_defaults(self, data: RolloutDataModule) -> list[Derived]:
        """Derives the fields that are null from what is known before the start; says which, and from what."""
        unset = unset_fields(None if self.has_own_optimizer else self.optimization, self.cold_start, data)
        if not unset:
            return []
        group_size, longest = self.algorithm.group_size, self.sampling.max_completion_length
        episodes = self.environment is not None
        facts = run_facts(self.policy_config, group_size, longest, self.cold_start, data, episodes=episodes)
        found = derive(facts, unset)
        self.take_derived({each.field: each.value for each in found}, data)
        return found

    def take_derived(self, values: Mapping[str, Any], data: RolloutDataModule) -> None:
        """Sets fields that were null, by their dotted names."""
        self.optimization, self.cold_start = with_values(values, self.optimization, self.cold_start, data)

    def prepare_data(self) -> None:
        """Checks the run; in one process a node."""
        checks.check_data(self.trainer)
        checks.check_trainer(self.trainer)  # before minutes are spent
        self.engine.check_device(self.trainer.strategy.root_device)
        if self.trainer.training:
            checks.warn_of_global_seed(self.seed)
            checks.warn_of_float32_on_gpu(self.trainer, self.policy_config)
            checks.check_optimization(self)
        checks.check_monitors(self.trainer.callbacks, self.validation, self.rewards, self._data)  # type: ignore[attr-defined]
        self.derive_defaults(self._data)
        self._resolve_characters()
        if self.demonstrations is not None and self.trainer.training:
            dialogue = Dialogue(template=self.template, tokenizer=load_tokenizer(self.policy_config))
            self.demonstrations.check(self._data.source, dialogue, in_environment=self.environment is not None)

    def _make_start(self) -> None:
        """Makes the cold start where it is missing, by a fit inside of this one before the policy is loaded."""
        self.derive_defaults(self._data)
        self._resolve_characters()
        if self.policy is None and (start := self._start) is not None and self._needs_start_weights():
            bar = self.trainer.progress_bar_callback
            make_start(
                start,
                self.policy_config,
                self.template,
                self._data.source,
                self.stage,
                trainer=self.trainer,
                activation_checkpointing=self.activation_checkpointing,
                bar=bar is not None and not isinstance(bar, StepCallback),  # Lightning's bars count batches alone
                report=self._report_cold_start,
            )

    def configure_model(self) -> None:
        """Loads tokenizer, policy and, if the objective asks for them, the frozen reference and teachers; what an
        earlier stage or `load_from_checkpoint` has loaded stays."""
        sharding = self.trainer.strategy.sharding if isinstance(self.trainer.strategy, FSDP2Strategy) else None
        if self.policy is None:
            self.derive_defaults(self._data)
            self._load_policy(sharded=sharding is not None)
        elif sharding and not is_sharded(self.policy):
            raise ValueError("FSDP2 cannot shard a policy that is loaded already: give its checkpoint as ckpt_path.")
        policy, training = self.require_policy(), self.trainer.training
        if training and sharding is None:
            switch_noise_off(policy)
        elif training:
            rank_zero_info(
                "Weights are sharded: nobody tried whether training mode adds noise to what the policy computes."
            )
        if self.activation_checkpointing:
            checkpoint_activations(policy)
        if training:
            self._scoring.copy_policy(policy, self.algorithm, self.privileged, self.sampler)
        if sharding and not is_sharded(policy):
            shard(policy, sharding)
        if sharding:
            self._scoring.shard(sharding)
        if training and self.algorithm.needs.teacher and self._scoring.teacher is None:
            self.check_teachers(self._data)
            self._scoring.teachers = Teachers(self.teacher_configs, self.tokenizer, sharding)

    def check_teachers(self, data: RolloutDataModule) -> None:
        """Refuses teachers that lack a part of the data, or would read other tokens than the policy writes."""
        if self.privileged is not None:
            self.privileged.check_columns(first_prompts(data), self.rewards)
        elif self.algorithm.needs.teacher:
            check_for_data(self.teacher_configs, data, load_tokenizer(self.policy_config), self.template)

    @property
    def has_own_optimizer(self) -> bool:
        """True if a subclass, or a LightningCLI, has put its own in place of `configure_optimizers`."""
        return getattr(self.configure_optimizers, "__func__", None) is not GRPOModule.configure_optimizers

    def configure_optimizers(self) -> Any:
        """AdamW of ``optimization``. A subclass may return another optimiser, with groups and schedulers: it is used as
        it is, each scheduler takes a step after each rollout, or where its ``interval`` is ``step`` after each step of
        the optimiser, and ``optimization`` only clips."""
        if self.has_own_optimizer:
            raise ValueError(
                f"configure_optimizers of {type(self).__name__} asks GRPOModule's for an optimiser, whose rate "
                "model.optimization would set anew at each rollout: make it there, as torch.optim.AdamW(…)."
            )
        return self.optimization.build(self.require_policy().parameters())

    def choose_source(self, data: RolloutDataModule) -> None:
        """Chooses where completions come from, with the engine and the correction of the objective that this needs."""
        self.source = rollout_source(
            data,
            self.partial_rollouts,
            group_size=self.algorithm.group_size,
            longest=self.sampling.max_completion_length,
        )
        self.algorithm = self.configured_algorithm.for_stale_samples(self.source.stale)
        default = self.source.default_engine
        if self.engine is self._default_engine and type(self.engine) is not default:
            self.engine = self._default_engine = default()
        checks.check_engine(self.engine, self.algorithm, self.sampling, images=self.policy_config.images)
        self.source.check(self.engine, self.algorithm, self.sampling, self.environment)

    def on_fit_start(self) -> None:
        if not self.trainer.strategy.restore_checkpoint_after_setup:
            self._data.check_rollouts_left()
        checks.check_optimizers(self)
        self._choose_decoder()
        policy, precision = self.require_policy(), self.trainer.precision_plugin.forward_context
        collector, sync = self.collector, self._weight_sync
        self.source.start(
            SourceRun(collector=collector, policy=policy, data=self._data, sync=sync, precision=precision)
        )
        self._scoring.move_to(self.device, policy.dtype)

    # --- training ---------------------------------------------------------------------------------------------------

    def training_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Experience | Tensor]:
        """One rollout and its updates; `collect` and `update` are the two halves that a subclass may override."""
        started = time.perf_counter()
        self.engine.updates = self._data.completed_rollouts
        self._weight_sync.begin(self._data.completed_rollouts)
        experience = self.collect(batch)  # prompts → rollout → reward → advantage
        self._data.source.observe(experience.rates)
        self._before_update(experience)
        result = self.update(experience)  # → loss → update
        seconds = time.perf_counter() - started
        self.engine.update_weights(self.require_policy())
        self._log_step(experience, result, seconds)  # → metrics
        self._step_schedulers("epoch", batch.step + 1)
        self.source.commit(batch.step)
        self._data.completed_rollouts += 1
        loss = torch.tensor(result.losses or [0.0]).mean()  # for SpikeDetection and others that expect one
        return {"experience": experience, "loss": loss}  # for callbacks, as ``outputs``

    def collect(self, batch: PromptBatch) -> Experience:
        """Prompts → rollout → reward → advantage."""
        policy = self.require_policy()
        optimizer = cast(torch.optim.Optimizer, self.optimizers())
        reserved, trained = self.engine.unclaimed_bytes(policy), bool(optimizer.state)
        self.budget.resolve(policy, trained_before=trained, collective=self.collective, reserved=reserved)
        self._scoring.renew(policy, batch.step)
        collected = self.source.take(batch, self.collector)
        self.engine.rest()
        if self.environment is not None:
            self._step_log.warn_of_failed_episodes(*without_value(collected.samples, self.collective))
        reference = None if self._scoring.reference is None else self._scoring.reference.model
        return self._experience_maker().make(policy, reference, collected, self._scoring.teacher)

    def update(self, experience: Experience) -> UpdateResult:
        """Advantage → loss → update."""
        optimizer = cast(torch.optim.Optimizer, self.optimizers())
        if not self.has_own_optimizer:
            self.optimization.configure(optimizer, rollout=experience.samples.step, total=self._data.steps)
        result = self.policy_update(experience.samples.step).run(
            self.require_policy(), optimizer, experience, self._backward
        )
        self._term_states.observe(self.algorithm, partial(self.collective.ratios, result.sums))
        return result

    def _experience_maker(self) -> ExperienceMaker:
        return ExperienceMaker(
            algorithm=self.algorithm,
            sampling=self.sampling,
            budget=self.budget,
            collective=self.collective,
            longest=self.longest_completion,
        )

    def policy_update(self, step: int) -> PolicyUpdate:
        """The update stage as it is set up for a step."""
        more: dict[str, Any] = {}
        if self.demonstrations is not None:
            of_step, source, dialogue = self.demonstrations.of_step, self._data.source, self.sampler.dialogue
            more["beside"] = partial(of_step, step, algorithm=self.algorithm, source=source, dialogue=dialogue)
        return PolicyUpdate(
            algorithm=self._term_states.adapted(self.algorithm),
            optimization=self.optimization,
            temperature=self.sampling.temperature,
            max_completion_length=self.longest_completion,
            budget=self.budget,
            seed=self.seed,
            collective=self.collective,
            report=self._report,
            pad_token_id=int(self.tokenizer.pad_token_id),
            after_step=lambda: self._step_schedulers("step", self.trainer.global_step),
            **more,
        )

    def _backward(self, loss: Tensor, last: bool) -> None:
        with joining_gradients(self.trainer.strategy, self.require_policy(), last=last):
            self.manual_backward(loss)

    def _before_update(self, experience: Experience) -> None:
        for callback in self._step_callbacks:
            callback.before_update(self.trainer, self, experience)

    def _log_step(self, experience: Experience, result: UpdateResult, seconds: float) -> None:
        """Logs the metrics of a step, and ends a run that has diverged."""
        more: dict[str, float] = {}
        for callback in self._step_callbacks:
            more |= callback.step_metrics(self.trainer, self, experience)
        more |= self._weight_sync.metrics | self.source.metrics(experience)
        more |= self._term_states.metrics(self.algorithm)
        step = experience.samples.step
        lr = float(cast(torch.optim.Optimizer, self.optimizers()).param_groups[0]["lr"])
        metrics = self._step_log.metrics(experience, result, self.collective, more=more, lr=lr, step_seconds=seconds)
        self.log_dict(metrics, on_step=True, on_epoch=False, logger=False, batch_size=len(experience.keep))
        for logger in self.loggers:  # Lightning's own way would repeat old values of names that are missing today
            logger.log_metrics(metrics, step=step + 1)
        self._step_log.check_divergence(result.taken, self.optimization.max_skipped_updates)

    def _step_schedulers(self, interval: str, done: int) -> None:
        """Takes a step of each scheduler of an own `configure_optimizers` with this interval, in its frequency."""
        for own in self.trainer.lr_scheduler_configs:
            if own.interval == interval and done % own.frequency == 0:
                self.lr_scheduler_step(own.scheduler, None)

    def _wait_for_engine(self) -> None:
        self.source.wait()

    # --- checkpoint -------------------------------------------------------------------------------------------------

    def finish_rollouts(self) -> dict[int, str]:
        """See `RolloutSource.finish`."""
        return self.source.finish()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint |= self._step_log.state_dict() | self._scoring.state_dict()
        checkpoint["token_budget"] = self.budget.state_dict()
        checkpoint["engine"] = self.engine.state_dict()
        checkpoint["terms"] = self._term_states.state_dict()
        checkpoint |= self.source.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        checks.warn_of_earlier_rules(checkpoint, str(self.trainer.precision))
        self._step_log.load_state_dict(checkpoint)
        self._term_states.load_state_dict(checkpoint)
        self.budget.load_state_dict(checkpoint.get("token_budget", TokenBudget().state_dict()))
        self.engine.load_state_dict(checkpoint.get("engine", {}))
        if self.trainer.training:
            self.source.load_state_dict(checkpoint)
        self._scoring.load_state_dict(checkpoint)
