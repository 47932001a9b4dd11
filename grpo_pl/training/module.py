"""``GRPOModule``: the LightningModule that wires prompts → rollout → reward → advantage → loss → update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from grpo_pl.config.objects import build
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.orphans import end_with_launcher
from grpo_pl.distributed.sharding import build_once, gathered, shard
from grpo_pl.distributed.strategy import FSDP2Strategy
from grpo_pl.environments.base import Environment
from grpo_pl.environments.pool import EnvironmentPool
from grpo_pl.evaluation.held_out import Answers, HeldOutMetrics, MetricResult, Validation
from grpo_pl.functional.sampling import DRAW_RULE
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig, context_length, load_model, load_tokenizer
from grpo_pl.policy.teacher import PROMPTS_COMPARED, TeacherConfig
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.trained import SETTINGS, find_model
from grpo_pl.policy.weights import is_sharded
from grpo_pl.rewards.base import Reward
from grpo_pl.rewards.batch import check_rewards
from grpo_pl.rewards.trust import Untrusted, refuse_own_classes
from grpo_pl.rollout.copy_engine import CopyEngine
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.rollout.native.child import NativeChildEngine
from grpo_pl.rollout.native.decoder_choice import TORCH, decoder_for_run
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.sampler import CompletionSampler
from grpo_pl.training.carried import CarriedRollouts, PartialRollouts, check_partial
from grpo_pl.training.checks import check_averaging, check_engine, check_monitors, check_parts, check_trainer
from grpo_pl.training.cold_start import ColdStart, Stage
from grpo_pl.training.collect import Collector, pass_rates
from grpo_pl.training.defaults import Derived, derive, look_at, unset_fields, with_values
from grpo_pl.training.entropy_control import EntropyControl
from grpo_pl.training.experience import Experience, ExperienceMaker
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.metrics import REFLECTION_WORDS, noted_means, staleness
from grpo_pl.training.microbatches import TokenBudget
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.pipeline import Draws
from grpo_pl.training.reference import Reference
from grpo_pl.training.rollouts_ahead import RolloutsAhead
from grpo_pl.training.step_log import StepLog
from grpo_pl.training.stopwatch import stopwatch
from grpo_pl.training.sync_proof import SyncProof
from grpo_pl.training.teacher import Teachers, check_sources, check_teachers, check_tokenizers, teacher_configs
from grpo_pl.training.turn_supervision import check_episodes, without_value
from grpo_pl.training.update import PolicyUpdate, UpdateResult
from grpo_pl.training.vocabulary import first_prompts, with_collected_characters
from grpo_pl.types import Problem, PromptBatch, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class GRPOModule(LightningModule):
    """Trains a policy by GRPO or a relative; one training batch is one rollout and its updates.

    Args:
        policy: the language model to train.
        rewards: score completions; exactly one of them decides what a right answer is (``correctness: true``).
        template: how a question becomes a prompt.
        algorithm: the objective.
        teacher: a frozen model whose distributions the policy learns from, where the objective asks for one.
        teachers: one for each part of a mixture instead, by name.
        environment: what the policy acts in, turn by turn; null asks for completions of a single turn.
        episodes: limits of the episodes that are played in the environment.
        engine: what draws completions; null takes the native engine.
        sampling: length, temperature and ends of training completions.
        partial_rollouts: draws long completions over several steps; null draws every one to its end.
        optimization: AdamW, learning-rate schedule, clipping.
        validation: how held-out problems are answered.
        cold_start: supervised fine-tuning before RL, made once and cached; null starts from the policy as it is.
        max_tokens_per_microbatch: most tokens per forward and backward pass, a group's prompt counted once; null finds
            what fits into memory.
        activation_checkpointing: compute activations again in the backward pass instead of keeping them.
        reflection_words: completions with one of these count in ``completions/reflection_rate``.
        seed: part of the key of every sample; with weights and configuration it determines the run.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        rewards: list[Reward],
        template: PromptTemplate = PromptTemplate(),  # noqa: B008 - frozen
        algorithm: GRPOAlgorithm = GRPOAlgorithm(),  # noqa: B008 - frozen
        teacher: TeacherConfig | None = None,
        teachers: dict[str, TeacherConfig] | None = None,
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
        check_rewards(rewards, steps_needed=algorithm.needs_step_rewards)
        check_episodes(environment, algorithm, rewards)
        self.teacher_configs = teacher_configs(teacher, teachers)
        """By source; used where the objective asks for a teacher."""
        check_teachers(self.teacher_configs, algorithm, temperature=sampling.temperature)
        sampling.require_on_policy()
        check_parts(
            policy,
            algorithm,
            sampling,
            cold_start=cold_start,
            in_one_go=environment is None and partial_rollouts is None,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
        )
        self.budget = TokenBudget(configured=max_tokens_per_microbatch)
        self.automatic_optimization = False
        self.policy_config, self.template, self.cold_start = policy, template, cold_start
        self.rewards, self.algorithm = rewards, algorithm
        self.sampling = replace(sampling, top_logprobs=algorithm.trust_region_top_k)
        self.optimization, self.validation = optimization, validation
        self.engine = engine or NativeEngine()
        self._default_engine = self.engine if engine is None else None
        self._chosen_mismatch = algorithm.mismatch
        self.environment, self.episodes = environment, episodes
        self.pool = None if environment is None else EnvironmentPool(environment, episodes)
        """Where episodes are played; closed when a fit or validation ends, however it ends."""
        self.seed = seed
        self.activation_checkpointing = activation_checkpointing
        self.decoder: str | None = None
        """The native engine's decoder in the whole run, on all ranks (see `choose_decoder`); None before a fit."""
        self.policy: PreTrainedModel | None = None
        self.settings: dict[str, Any] | None = None
        """What the module is built from, as plain values, for its checkpoints; None for one that is made in Python."""
        self.held_out: dict[str, MetricResult] = {}
        """What the last validation found, by metric key."""
        self.unjudged: dict[str, int] = {}
        """By group: how many completions of the last validation could not be judged, and count nowhere."""
        self.held_out_counts: dict[str, dict[int, tuple[int, int]]] = {}
        """By group and problem id: right and judged completions of the last validation."""
        self._held_out: HeldOutMetrics | None = None
        self._answered = self._to_answer = 0  # held-out completions of this process, in a validation
        self._reference: Reference | None = None
        self._teachers: Teachers | None = None
        self._sync_proof = SyncProof()
        self._ahead: RolloutsAhead | None = None
        self._stored_rollouts: list[dict[str, Any]] = []  # a checkpoint's, as long as nobody has taken them
        self._carried = None if partial_rollouts is None else CarriedRollouts(settings=partial_rollouts)
        self._step_log = StepLog(rewards, reflection_words)
        self._entropy_control = EntropyControl()

    # --- building ---------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        check_trainer(self.trainer)
        end_with_launcher()
        self.engine.close()  # a copy of weights that it kept would be that of an earlier fit
        self._sync_proof = SyncProof()
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        if stage == "fit":
            self.prepare_staleness(self._data.staleness)
            copied = isinstance(self.engine, CopyEngine) or isinstance(self.trainer.strategy, FSDP2Strategy)
            check_averaging(callbacks, copied=copied or self.environment is not None)
            if self.trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning would count optimizer steps as well
                self.trainer.fit_loop.epoch_loop.max_steps = -1
            self._data.repeat_rollouts(self.trainer.overfit_batches)  # type: ignore[attr-defined]
            if self._data.repeated is not None:  # Lightning would end after them, and validate on as few
                self.trainer.limit_train_batches = self.trainer.limit_val_batches = 1.0

    def teardown(self, stage: str) -> None:
        """Ends what draws and plays, however a fit or validation ends."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self.engine.close()
        if self.pool is not None:
            self.pool.close()

    def derive_defaults(self, data: RolloutDataModule) -> list[Derived]:
        """Derives the fields that are null from what is known before the start; says which, and from what."""
        unset = unset_fields(self.optimization, self.cold_start, data)
        if not unset:
            return []
        known = look_at(
            self.policy_config,
            self.algorithm.group_size,
            self.sampling.max_completion_length,
            self.cold_start,
            data,
            episodes=self.environment is not None,
        )
        found = derive(known, unset)
        self.take_derived({each.field: each.value for each in found}, data)
        return found

    def take_derived(self, values: Mapping[str, Any], data: RolloutDataModule) -> None:
        """Sets fields that were null, by their dotted names."""
        self.optimization, self.cold_start = with_values(values, self.optimization, self.cold_start, data)

    def prepare_data(self) -> None:
        """Makes the cold start where it is missing, as a download would; runs in one process a node."""
        check_trainer(self.trainer)  # before minutes are spent
        check_monitors(self.trainer.callbacks, self.validation, self._data)  # type: ignore[attr-defined]
        self.derive_defaults(self._data)
        self._resolve_characters()
        if self.policy is None and (start := self._start()) is not None and self._needs_start_weights():
            device = self.trainer.strategy.root_device
            start.ensure(self.policy_config, self.template, self._data.source, self.stage, device=device)

    def _start(self) -> ColdStart | None:
        """The cold start of this run, cut to two steps by ``trainer.fast_dev_run``."""
        start = self.cold_start
        if start is None or not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return start
        steps, batch_size, _ = start.size
        return replace(start, steps=min(2, steps), count=start.count and min(start.count, 2 * batch_size))

    def configure_model(self) -> None:
        """Loads tokenizer, policy and, if the objective asks for them, the frozen reference and teachers; what an
        earlier stage or `load_from_checkpoint` has loaded stays."""
        sharding = self.trainer.strategy.sharding if isinstance(self.trainer.strategy, FSDP2Strategy) else None
        if self.policy is None:
            self._load_policy(sharded=sharding is not None)
        elif sharding and not is_sharded(self.policy):
            raise ValueError("FSDP2 cannot shard a policy that is loaded already: give its checkpoint as ckpt_path.")
        policy, training = self.require_policy(), self.trainer.training
        if self.activation_checkpointing:
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.algorithm.needs_reference and training and self._reference is None:
            self._reference = Reference(policy, self.algorithm.ref_update_every)
        if sharding and not is_sharded(policy):
            shard(policy, sharding)
            if self._reference is not None and self._reference.model is not policy:
                shard(self._reference.model, sharding)
        if self.algorithm.needs_teacher and training and self._teachers is None:
            self.check_teachers(self._data)
            self._teachers = Teachers(self.teacher_configs, self.tokenizer, sharding)

    def _load_policy(self, *, sharded: bool) -> None:
        if sharded and self.policy_config.quantization is not None:
            raise ValueError(
                "policy.quantization cannot be sharded by FSDP2: set it null, or another trainer.strategy."
            )
        self.derive_defaults(self._data)
        self._resolve_characters()
        self.tokenizer = load_tokenizer(self.policy_config)
        needs_weights = self._needs_start_weights()
        path = None
        if (start := self._start()) is not None and needs_weights:
            path = str(start.folder(self.policy_config, self.template, self._data.source, self.stage))
        build = partial(load_model, self.policy_config, self.tokenizer, path)
        self.policy = build_once(build) if sharded else build(weights=needs_weights)

    def check_teachers(self, data: RolloutDataModule) -> None:
        """Refuses teachers that lack a part of the data, or would read other tokens than the policy writes.

        Raises:
            ValueError: what differs.
        """
        if self.algorithm.needs_teacher:
            check_sources(self.teacher_configs, data.source.leaves())
            asked = [problem.asked for problem in islice(first_prompts(data), PROMPTS_COMPARED)]
            check_tokenizers(self.teacher_configs, load_tokenizer(self.policy_config), self.template, asked)

    def _resolve_characters(self) -> None:
        """Collects what ``policy.characters: from_data`` stands for, unless the command line has done so."""
        self.policy_config = with_collected_characters(
            self.policy_config, self.template, self._data, self.cold_start, self.stage
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimization.build(self.require_policy().parameters())

    def prepare_staleness(self, staleness: int) -> None:
        """Prepares for rollouts that are ``staleness`` updates old: their engine, and the objective's correction.

        Raises:
            ValueError: see `check_engine`.
        """
        self.algorithm = self.configured_algorithm.for_stale_samples(staleness > 0 or self.draws_in_parts)
        if self._carried is not None:
            check_partial(self.algorithm, has_environment=self.environment is not None, staleness=staleness)
        default = NativeChildEngine if staleness > 0 else NativeEngine
        if self.engine is self._default_engine and type(self.engine) is not default:
            self.engine = self._default_engine = default()
        check_engine(self.engine, self.algorithm, self.sampling, staleness=staleness)

    @property
    def configured_algorithm(self) -> GRPOAlgorithm:
        """The objective as it was given, before a fit chose what it left open."""
        return replace(self.algorithm, mismatch=self._chosen_mismatch)

    @property
    def draws_in_parts(self) -> bool:
        """Whether long completions take several steps."""
        return self._carried is not None

    def on_fit_start(self) -> None:
        self._choose_decoder()
        if self._data.staleness > 0:
            self._ahead = RolloutsAhead(
                collector=self._collector,
                policy=self.require_policy(),
                data=self._data,
                proof=self._sync_proof,
                precision=self.trainer.precision_plugin.forward_context,
            )
            self._hand_over_rollouts()
        if self._reference is not None and not is_sharded(self._reference.model):
            self._reference.model.to(self.device)

    def on_validation_start(self) -> None:
        if getattr(self.engine.drawing_engine, "decoder", TORCH) is None:  # outside a fit
            self._choose_decoder()

    def _choose_decoder(self) -> None:
        """All ranks draw with what rank 0 would, and a resumed run with what it drew with before, where it is there."""
        drawing = self.engine.drawing_engine
        if not isinstance(drawing, NativeEngine | NativeChildEngine):
            return
        policy, stops = self.require_policy(), bool(self.sampling.stop)
        with self.trainer.precision_plugin.forward_context():
            chosen, line = decoder_for_run(policy, self.sampling, stop_strings=stops, recorded=self.decoder)
        self.decoder = drawing.decoder = self.collective.gather_objects(chosen)[0]
        if line is not None:
            rank_zero_warn(line)

    def require_policy(self) -> PreTrainedModel:
        """The policy, once ``configure_model`` has run."""
        assert self.policy is not None, "configure_model has not run"
        return self.policy

    @property
    def sampler(self) -> CompletionSampler:
        return CompletionSampler(
            engine=self.engine,
            template=self.template,
            tokenizer=self.tokenizer,
            pool=self.pool,
            episodes=self.episodes,
        )

    @property
    def _collector(self) -> Collector:
        return Collector(
            sampler=self.sampler,
            rewards=self.rewards,
            algorithm=self.algorithm,
            sampling=self.sampling,
            seed=self.seed,
            collective=self.collective,
            report=self._report,
            should_stop=self._should_stop,
            before_draw=self._wait_for_engine,
            total_steps=self._data.steps,
        )

    @property
    def stage(self) -> Stage | None:
        """Where a cold start plays its demonstrations."""
        if self.environment is None:
            return None
        return Stage(environment=self.environment, plain=self.episodes.plain_turns)

    @property
    def longest_completion(self) -> int:
        """Most tokens that the policy writes in a completion or an episode."""
        length = self.sampling.max_completion_length
        if self.environment is None:
            return length
        context = None if self.policy is None else context_length(self.policy.config)
        return self.episodes.most_actions(self.sampling, context)

    # --- training ---------------------------------------------------------------------------------------------------

    def training_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Experience | Tensor]:
        seconds: dict[str, float] = {}
        self.engine.updates = self._sync_proof.updates = self._data.completed_rollouts
        self._sync_proof.metrics = {}
        with stopwatch(seconds, "step"):
            experience = self.collect(batch)
            rates = experience.rates or pass_rates(
                experience.samples.prompts, experience.values, self.rewards, self.collective
            )
            self._data.source.observe(rates)
            result = self.update(experience)
        self.engine.update_weights(self.require_policy())
        self._log_step(experience, result, seconds)
        self._step_log.check_divergence(result.taken, self.optimization.max_skipped_updates)
        if self._ahead is not None:
            self._ahead.done(batch.step)
        if self._carried is not None:
            self._carried.commit()
        self._data.completed_rollouts += 1
        loss = torch.tensor(result.losses or [0.0]).mean()  # for SpikeDetection and others that expect one
        return {"experience": experience, "loss": loss}  # for callbacks, as ``outputs``

    def collect(self, batch: PromptBatch) -> Experience:
        """Prompts → rollout → reward → advantage."""
        policy, reference = self.require_policy(), self._reference
        optimizer = cast(torch.optim.Optimizer, self.optimizers())
        self.budget.resolve(policy, trained_before=bool(optimizer.state), collective=self.collective)
        if reference is not None:
            reference.renew(policy, batch.step)
        maker = ExperienceMaker(
            algorithm=self.algorithm,
            sampling=self.sampling,
            budget=self.budget,
            collective=self.collective,
            longest=self.longest_completion,
        )
        with self._gathered_for_engine():
            seconds: dict[str, float] = {}
            drawn = self._drawn_before(batch, seconds)
            collected = self._collector.collect(policy, batch, self._data.prompts, drawn)
            for stage, spent in seconds.items():
                collected.seconds[stage] = collected.seconds.get(stage, 0.0) + spent
            if self.environment is not None:
                self._step_log.warn_of_failed_episodes(*without_value(collected.samples, self.collective))
            if drawn is None or collected.attempts:
                self._sync_proof.check(
                    policy,
                    collected.samples,
                    collected.seconds,
                    self.engine,
                    self.sampling.temperature,
                    self.collective,
                    newest_only=drawn is not None,
                )
            if self._ahead is not None:
                self._ahead.launch(batch.step)
            model = None if reference is None else reference.model
            return maker.make(policy, model, collected, self._teachers)

    def _drawn_before(self, batch: PromptBatch, seconds: dict[str, float]) -> Draws | None:
        """The step's rollout where it is drawn ahead, or in parts; both are held to the policy already."""
        if self._ahead is not None:
            return self._ahead.take(batch, seconds)
        if self._stored_rollouts:
            rank_zero_warn("data.staleness is 0: rollouts that the checkpoint holds are drawn again.")
            self._stored_rollouts = []
        if self._carried is None:
            return None
        policy, proof = self.require_policy(), self._sync_proof
        return self._carried.next_whole(self._collector, policy, self._data, proof, batch.step, seconds), None

    def _wait_for_engine(self) -> None:
        if self._ahead is not None:
            self._ahead.wait()

    def _gathered_for_engine(self) -> AbstractContextManager[None]:
        """Whole weights of a sharded policy for an engine that reads them; others gather a part at a time."""
        in_process = self.engine.weights_version is None
        return gathered(self.require_policy()) if in_process else nullcontext()

    def update(self, experience: Experience) -> UpdateResult:
        """Advantage → loss → update."""
        optimizer = cast(torch.optim.Optimizer, self.optimizers())
        self.optimization.configure(optimizer, rollout=experience.samples.step, total=self._data.steps)
        update = PolicyUpdate(
            algorithm=self._entropy_control.objective(self.algorithm),
            optimization=self.optimization,
            temperature=self.sampling.temperature,
            max_completion_length=self.longest_completion,
            budget=self.budget,
            seed=self.seed,
            collective=self.collective,
            report=self._report,
        )
        result = update.run(self.require_policy(), optimizer, experience, self._backward)
        if self.algorithm.entropy_target is not None:
            self._entropy_control.observe(self.algorithm, self.collective.ratios(result.sums).get("entropy"))
        return result

    def _backward(self, loss: Tensor, last: bool) -> None:
        """Adds gradients. Those of other processes join in the last micro-batch of an optimiser step, or, where whole
        gradients would take too much memory, in every one."""
        strategy = self.trainer.strategy
        if isinstance(strategy, FSDP2Strategy):
            policy = cast(FSDPModule, self.require_policy())
            policy.set_requires_gradient_sync(last or not strategy.defer_gradient_sync)
        wrapped = strategy.model
        with nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync():
            self.manual_backward(loss)

    def _log_step(self, experience: Experience, result: UpdateResult, seconds: dict[str, float]) -> None:
        more: dict[str, float] = {}
        for callback in self._step_callbacks:
            more |= callback.step_metrics(self.trainer, self, experience)
        more |= self._sync_proof.metrics
        if self._ahead is not None or self._carried is not None:
            more |= staleness(experience, self.collective)
        if self._entropy_control.coefficient is not None:
            more["entropy_coef"] = self._entropy_control.coefficient
        if self._carried is not None:
            more["rollout/carried_completions"] = float(self._carried.waiting)
        metrics = self._step_log.metrics(
            experience,
            result,
            self.collective,
            more=more,
            lr=self.optimization.lr_at(experience.samples.step, self._data.steps),
            step_seconds=seconds["step"],
        )
        self.log_dict(metrics, on_step=True, on_epoch=False, logger=False, batch_size=len(experience.keep))
        for logger in self.loggers:  # Lightning's own way would repeat old values of names that are missing today
            logger.log_metrics(metrics, step=experience.samples.step + 1)

    # --- validation -------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._begin_held_out(self.trainer.num_val_batches)

    def _begin_held_out(self, batches_of_loaders: Sequence[int | float]) -> None:
        self.engine.updates = self._data.completed_rollouts
        self._wait_for_engine()
        self._held_out = HeldOutMetrics(self.validation, self._data.held_out_groups(), self.device)
        self._answered = 0
        batches = int(sum(batches_of_loaders))  # fewer with trainer.limit_val_batches
        self._to_answer = self._data.held_out_share(batches) * (self.validation.samples + self.validation.greedy)

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Answers | None]:
        """Callbacks get what this returns, in ``on_validation_batch_end``."""
        assert self._held_out is not None
        sampling = self.validation.sampling(self.sampling)
        collector = replace(self._collector, report=self._report_validation)
        answer = partial(collector.answer, self.require_policy(), self._data.completed_rollouts, batch.prompts)
        with self._gathered_for_engine():
            sampled = answer(self.validation.samples, sampling)
            self._answered += sampled.correct.numel()
            greedy = answer(1, replace(sampling, temperature=0.0)) if self.validation.greedy else None
            self._answered += 0 if greedy is None else greedy.correct.numel()
        self._held_out.update(batch, sampled, greedy)
        return {"sampled": sampled, "greedy": greedy}

    def answer_greedily(self, problems: Sequence[Problem]) -> Answers:
        """A graded greedy completion of each problem, between two steps; all processes call it together, and it changes
        nothing of the run."""
        self.engine.updates = self._data.completed_rollouts
        self._wait_for_engine()
        sampling = replace(self.validation.sampling(self.sampling), temperature=0.0)
        with self.trainer.precision_plugin.forward_context(), self._gathered_for_engine():
            return self._collector.answer(self.require_policy(), self._data.completed_rollouts, problems, 1, sampling)

    def on_validation_epoch_end(self) -> None:
        self._log_held_out("val")

    def _log_held_out(self, stage: str) -> None:
        """Logs what was found, as ``val/…`` or ``test/…``."""
        assert self._held_out is not None
        self.held_out, self.unjudged = self._held_out.results(), self._held_out.unjudged()
        self.held_out_counts = self._held_out.counts()
        numbers = {key: found.mean for key, found in self.held_out.items()}
        taken = {key.removeprefix("val/") for key in [*self.held_out, "val/unjudged"]}
        noted = noted_means(self._held_out.noted, self.collective, taken)
        numbers |= {f"val/{name}": mean for name, mean in noted.items()}
        numbers |= {f"{group}/unjudged": float(count) for group, count in self.unjudged.items()}
        self.log("step", float(self._data.completed_rollouts), on_epoch=True)
        self.log_dict({stage + key.removeprefix("val"): number for key, number in numbers.items()}, on_epoch=True)

    # --- test and predict -------------------------------------------------------------------------------------------

    def on_test_start(self) -> None:
        self.on_validation_start()

    def on_test_epoch_start(self) -> None:
        self._begin_held_out(self.trainer.num_test_batches)

    def test_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Answers | None]:
        """As `validation_step`."""
        return self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._log_held_out("test")

    def on_predict_start(self) -> None:
        self.on_validation_start()

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[dict[str, Any]]:
        """A greedy completion of each of this process's problems, and whether it is right; None where that could not be
        judged."""
        answers = self.answer_greedily(batch.prompts)
        assert answers.samples is not None
        columns = (batch.prompts, batch.valid, answers.samples.completions, answers.correct[:, 0], answers.judged[:, 0])
        return [
            {
                "prompt_id": problem.id,
                "question": problem.question,
                "answer": problem.answer,
                "completion": completion,
                "correct": bool(correct) if judged else None,
            }
            for problem, valid, completion, correct, judged in zip(*columns, strict=True)
            if valid  # or it fills up the share of a process
        ]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the policy returns for token ids: logits, as a model of ``transformers`` does."""
        return self.require_policy()(*inputs, **named)

    # --- checkpoint -------------------------------------------------------------------------------------------------

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # Lightning's reads open files as well
        cls,
        checkpoint_path: str | Path,
        map_location: str | torch.device | None = None,
        hparams_file: None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **fields: Any,
    ) -> Self:
        """The module of a run of ``grpo-pl fit`` with the policy of a checkpoint, for `forward`, ``Trainer.test``,
        ``Trainer.predict`` and training from there. Engine and cold start of the run are left out.

        Args:
            checkpoint_path: a checkpoint of the run.
            map_location: device of the policy; null is the CPU.
            hparams_file: none; settings stand in the run's ``config.yaml``, or else in the checkpoint.
            strict: all weights must be there.
            weights_only: false lets the settings name any class, as a reward's.
            fields: values that take the place of the run's own, such as ``validation={"samples": 4}``.

        Raises:
            ValueError: no settings, as of a run that was made in Python, settings that name a class outside grpo_pl
                (``Untrusted``), or weights of another policy.
        """
        if hparams_file is not None or strict is False:
            raise ValueError(
                "load_from_checkpoint: leave out hparams_file and strict: all of a run is loaded, or nothing."
            )
        trusted = weights_only is False
        try:
            found = find_model(checkpoint_path, trust_rewards=trusted)
            if not trusted:
                refuse_own_classes({**found.settings, "engine": None, "cold_start": None})
        except Untrusted as error:
            raise Untrusted(f"{checkpoint_path}: {error} Here that is weights_only=False.") from error
        if found.checkpoint is None:
            raise ValueError(f"{checkpoint_path} is no checkpoint: give a file of the run's folder checkpoints.")
        settings = {**found.settings, "engine": None, "cold_start": None, **fields}
        module: Self = build(cls, settings, "model")
        module.tokenizer, module.decoder = found.tokenizer, found.decoder or None
        module.policy = found.load_policy(str(map_location or "cpu"))
        return module

    def finish_rollouts(self) -> dict[int, str]:
        """See `RolloutsAhead.finish`; nothing is lost where none is drawn ahead."""
        return {} if self._ahead is None else self._ahead.finish()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.settings is not None:
            checkpoint[SETTINGS] = self.settings
        checkpoint["characters"] = self.policy_config.characters
        checkpoint["draw_rule"] = DRAW_RULE
        checkpoint["decoder"] = self.decoder
        checkpoint |= self._step_log.state_dict()
        checkpoint["token_budget"] = self.budget.state_dict()
        checkpoint["entropy_control"] = self._entropy_control.state_dict()
        checkpoint["rollouts"] = self._stored_rollouts if self._ahead is None else self._ahead.state_dict()
        checkpoint["carried"] = {} if self._carried is None else self._carried.state_dict()
        checkpoint["reference"] = {} if self._reference is None else self._reference.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        characters = self.policy_config.characters
        if checkpoint.get("characters", characters) != characters:
            raise ValueError(
                "the checkpoint was trained with other policy.characters: give those of the config.yaml of its run."
            )
        if checkpoint.get("draw_rule") != DRAW_RULE:
            rank_zero_warn(
                "the checkpoint's run drew tokens by an earlier rule than this version's: samples differ from here on."
            )
        self.decoder = checkpoint.get("decoder", TORCH)  # before there was a kernel, torch drew
        if getattr(self.engine, "decoder", None) is not None:  # of a sharded one, read after the start of a fit
            self._choose_decoder()
        self._step_log.load_state_dict(checkpoint)
        self._entropy_control.load_state_dict(checkpoint.get("entropy_control", {}))
        self.budget.load_state_dict(checkpoint.get("token_budget", TokenBudget().state_dict()))
        found = checkpoint.get("compute")  # what an earlier version's model.compute: auto measured
        in_bfloat16 = found and found["gain"] >= 1.3 and found["mean_error"] <= 1e-2 and found["p99_error"] <= 5e-2
        if in_bfloat16 and self.trainer.precision == "32-true":
            rank_zero_warn(
                "the checkpoint's run computed in bfloat16 by model.compute: auto, this one computes in float32; "
                "trainer.precision: bf16-mixed goes on as before."
            )
        self._stored_rollouts = checkpoint.get("rollouts", [])
        self._hand_over_rollouts()
        if carried := checkpoint.get("carried"):
            if self._carried is not None:
                self._carried.load_state_dict(
                    carried,
                    group_size=self.algorithm.group_size,
                    longest=self.sampling.max_completion_length,
                )
            else:
                rank_zero_warn("model.partial_rollouts is off: completions that the checkpoint carries are dropped.")
        if self._reference is not None:
            self._reference.load_state_dict(checkpoint["reference"])

    def _hand_over_rollouts(self) -> None:
        """Sharded checkpoints are read after the start of a fit, others before."""
        if self._ahead is not None:
            self._ahead.load_state_dict(self._stored_rollouts)
            self._stored_rollouts = []

    # --- the run around ---------------------------------------------------------------------------------------------

    @property
    def collective(self) -> Collective:
        return Collective(rank=self.trainer.global_rank, world=self.trainer.world_size)

    @property
    def _data(self) -> RolloutDataModule:
        return cast(RolloutDataModule, self.trainer.datamodule)  # type: ignore[attr-defined]

    @property
    def _step_callbacks(self) -> list[StepCallback]:
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        return [callback for callback in callbacks if isinstance(callback, StepCallback)]

    def _report(self, stage: str, done: int, total: int, note: str = "") -> None:
        for callback in self._step_callbacks:
            callback.on_stage_progress(stage, done, total, note)

    def _report_validation(self, stage: str, done: int, total: int, note: str = "") -> None:
        """``done`` completions of a batch of held-out problems, of all batches; ``note`` is of that one alone."""
        self._report(stage, self._answered + done, self._to_answer)

    def _should_stop(self) -> bool:
        return any(callback.should_stop() for callback in self._step_callbacks)

    def _needs_start_weights(self) -> bool:
        """A checkpoint brings the policy's weights; a reference is always the policy's start."""
        frozen = self.policy_config.quantization is not None  # a checkpoint holds what was trained alone
        return frozen or self.trainer.ckpt_path is None or (self.algorithm.needs_reference and self.trainer.training)
