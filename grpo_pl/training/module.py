"""``GRPOModule``: the LightningModule that wires prompts → rollout → reward → advantage → loss → update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.orphans import end_with_launcher
from grpo_pl.distributed.sharding import build_once, gathered, shard
from grpo_pl.distributed.strategy import FSDP2Strategy
from grpo_pl.environments.base import Environment
from grpo_pl.environments.pool import EnvironmentPool
from grpo_pl.evaluation.held_out import Answers, HeldOutMetrics, MetricResult, Validation, grade
from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig, context_length, load_model, load_tokenizer
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.weights import is_sharded
from grpo_pl.rewards.base import Reward
from grpo_pl.rewards.batch import check_rewards
from grpo_pl.rollout.copying import CopyEngine
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.rollout.native.child import NativeChildEngine
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.partial import PartialCompletion, PartialGroup, PartialSampler, Place
from grpo_pl.rollout.sampler import CompletionSampler, Samples
from grpo_pl.training.carried import CarriedRollouts, PartialRollouts, check_partial
from grpo_pl.training.cold_start import ColdStart, Stage
from grpo_pl.training.collect import Collected, Collector, drawn_together, trainer_state
from grpo_pl.training.defaults import Derived, derive, look_at, unset_fields
from grpo_pl.training.experience import Experience, ExperienceMaker
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.metrics import (
    REFLECTION_WORDS,
    broken_share,
    experience_metrics,
    noted_means,
    pass_rates,
    staleness,
)
from grpo_pl.training.microbatches import TokenBudget
from grpo_pl.training.optimization import Optimization, TrainingDiverged
from grpo_pl.training.pipeline import Ahead, RolloutPipeline, check_stored, earlier_weights
from grpo_pl.training.plain_samples import check_plain
from grpo_pl.training.reference import Reference
from grpo_pl.training.stopwatch import stopwatch
from grpo_pl.training.sync_proof import ROWS, Comparison, SyncProof, compare
from grpo_pl.training.turn_supervision import check_episodes, without_value
from grpo_pl.training.update import PolicyUpdate, UpdateResult
from grpo_pl.training.vocabulary import with_collected_characters
from grpo_pl.types import PromptBatch, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class GRPOModule(LightningModule):
    """Trains a policy by GRPO or a relative; one training batch is one rollout and its updates.

    Args:
        policy: the language model to train.
        rewards: score completions; exactly one of them decides what a right answer is (``correctness: true``).
        template: how a question becomes a prompt.
        algorithm: the objective.
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
        sampling.require_on_policy()
        self.budget = TokenBudget(configured=max_tokens_per_microbatch)
        if max_tokens_per_microbatch is not None and max_tokens_per_microbatch <= sampling.max_completion_length:
            raise ValueError(
                f"model.max_tokens_per_microbatch is {max_tokens_per_microbatch}, but must hold a prompt and a "
                f"completion of up to {sampling.max_completion_length} tokens (model.sampling.max_completion_length)."
            )
        self.automatic_optimization = False
        self.policy_config, self.template, self.cold_start = policy, template, cold_start
        self.rewards, self.algorithm, self.sampling = rewards, algorithm, sampling
        self.optimization, self.validation = optimization, validation
        self.engine = engine or NativeEngine()
        self._default_engine = self.engine if engine is None else None
        self._chosen_mismatch = algorithm.mismatch
        self.environment, self.episodes = environment, episodes
        self.pool = None if environment is None else EnvironmentPool(environment, episodes)
        """Where episodes are played; closed when a fit or validation ends, however it ends."""
        self.reflection_words, self.seed = reflection_words, seed
        self.activation_checkpointing = activation_checkpointing
        self.policy: PreTrainedModel | None = None
        self.held_out: dict[str, MetricResult] = {}
        """What the last validation found, by metric key."""
        self.unjudged: dict[str, int] = {}
        """By group: how many completions of the last validation could not be judged, and count nowhere."""
        self._held_out: HeldOutMetrics | None = None
        self._noted: dict[str, list[float]] = {}  # what reward functions logged in this validation
        self._reference: Reference | None = None
        self._sync_proof = SyncProof()
        self._pipeline: RolloutPipeline | None = None
        self._carried = None if partial_rollouts is None else CarriedRollouts(settings=partial_rollouts)
        self._stored_rollouts: list[dict[str, Any]] = []  # a checkpoint's, until the first step
        self._skipped_in_a_row = 0
        self._warned_of_rewards = self._warned_of_episodes = False
        self._tokens_seen = 0
        self._tokenizer_of_thread: PreTrainedTokenizerBase | None = None

    # --- building ---------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        end_with_launcher()
        self.engine.close()  # a copy of weights that it kept would be that of an earlier fit
        self._sync_proof = SyncProof()
        if stage == "fit":
            self.prepare_staleness(self._data.staleness)

    def teardown(self, stage: str) -> None:
        """Ends what draws and plays, however a fit or validation ends."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
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
        parts: dict[str, dict[str, Any]] = {}
        for field, value in values.items():
            place, _, name = field.rpartition(".")
            parts.setdefault(place, {})[name] = value
        self.optimization = replace(self.optimization, **parts.get("model.optimization", {}))
        if self.cold_start is not None:
            self.cold_start = replace(self.cold_start, **parts.get("model.cold_start", {}))
        for name, value in parts.get("data", {}).items():
            setattr(data, name, value)

    def prepare_data(self) -> None:
        """Makes the cold start where it is missing, as a download would; runs in one process a node."""
        self.derive_defaults(self._data)
        self._resolve_characters()
        if self.cold_start is not None and self._needs_start_weights():
            device = self.trainer.strategy.root_device
            self.cold_start.ensure(self.policy_config, self.template, self._data.source, self.stage, device=device)

    def configure_model(self) -> None:
        """Loads tokenizer, policy and, if the objective pulls towards one, the frozen reference."""
        if self.policy is not None:
            return
        self.derive_defaults(self._data)
        self._resolve_characters()
        self.tokenizer = load_tokenizer(self.policy_config)
        needs_weights = self._needs_start_weights()
        path = None
        if self.cold_start is not None and needs_weights:
            path = str(self.cold_start.folder(self.policy_config, self.template, self._data.source, self.stage))
        build = partial(load_model, self.policy_config, self.tokenizer, path)
        sharding = self.trainer.strategy.sharding if isinstance(self.trainer.strategy, FSDP2Strategy) else None
        self.policy = build_once(build) if sharding else build(weights=needs_weights)
        if self.activation_checkpointing:
            self.policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self.algorithm.needs_reference and self.trainer.training:
            self._reference = Reference(self.policy, self.algorithm.ref_update_every)
        if sharding:
            shard(self.policy, sharding)
            if self._reference is not None and self._reference.model is not self.policy:
                shard(self._reference.model, sharding)

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
            ValueError: the engine reads the policy's weights while it draws, and they change.
        """
        chosen = replace(self.algorithm, mismatch=self._chosen_mismatch)  # an earlier fit may have set its own
        self.algorithm = chosen.for_stale_samples(staleness > 0 or self.draws_in_parts)
        if self._carried is not None:
            check_partial(self.algorithm, has_environment=self.environment is not None, staleness=staleness)
        default = NativeChildEngine if staleness > 0 else NativeEngine
        if self.engine is self._default_engine and type(self.engine) is not default:
            self.engine = self._default_engine = default()
        if staleness > 0 and not isinstance(self.engine, CopyEngine):
            raise ValueError(
                f"data.staleness is {staleness}, and {type(self.engine).__name__} reads the policy's weights while "
                "they change: set model.engine to NativeChildEngine, VLLMEngine or RemoteEngine, or leave it out."
            )

    @property
    def draws_in_parts(self) -> bool:
        """Whether long completions take several steps."""
        return self._carried is not None

    def on_fit_start(self) -> None:
        if self._data.staleness > 0 and isinstance(self.engine, CopyEngine):
            self._pipeline = RolloutPipeline(self.engine, share_threads=self.device.type == "cpu")
        if self._reference is not None and not is_sharded(self._reference.model):
            self._reference.model.to(self.device)

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

    def training_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Experience]:
        seconds: dict[str, float] = {}
        self.engine.updates = self._sync_proof.updates = self._data.completed_rollouts
        self._sync_proof.metrics = {}
        with stopwatch(seconds, "step"):
            experience = self.collect(batch)
            self._data.source.observe(pass_rates(experience, self.rewards, self.collective))
            result = self.update(experience)
        self.engine.update_weights(self.require_policy())
        self._log_step(experience, result, seconds)
        self._check_divergence(result)
        if self._pipeline is not None:
            self._pipeline.done(batch.step)
        if self._carried is not None:
            self._carried.commit()
        self._data.completed_rollouts += 1
        return {"experience": experience}  # for callbacks, as ``outputs``

    def collect(self, batch: PromptBatch) -> Experience:
        """Prompts → rollout → reward → advantage."""
        policy, reference = self.require_policy(), self._reference
        optimizer = cast(torch.optim.Optimizer, self.optimizers())
        self.budget.resolve(policy, trained_before=bool(optimizer.state), collective=self.collective)
        if reference is not None:
            reference.renew(policy, batch.step)
        collector = Collector(
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
        maker = ExperienceMaker(
            algorithm=self.algorithm,
            sampling=self.sampling,
            budget=self.budget,
            collective=self.collective,
            longest=self.longest_completion,
        )
        with self._gathered_for_engine():
            seconds: dict[str, float] = {}
            ahead = self._rollout_ahead(collector, batch, seconds)
            drawn = None if ahead is None else ahead.drawn.result()
            if self._carried is not None:
                drawn = self._next_whole(self._carried, batch.step, seconds), None
            collected = collector.collect(policy, batch, self._data.prompts, drawn)
            for stage, spent in seconds.items():
                collected.seconds[stage] = collected.seconds.get(stage, 0.0) + spent
            if self.environment is not None:
                self._warn_of_failed_episodes(*without_value(collected.samples, self.collective))
            if self._carried is None and (ahead is None or collected.attempts):
                self._prove(collected, None if ahead is None else self._data.completed_rollouts)
            if ahead is not None:
                self._launch(collector, batch.step + self._data.staleness)
            return maker.make(policy, None if reference is None else reference.model, collected)

    def _next_whole(self, carried: CarriedRollouts, step: int, seconds: dict[str, float]) -> Samples:
        """This rank's groups for the update, after every completion that is open has got a part more."""
        policy, settings = self.require_policy(), carried.settings
        sampler = PartialSampler(
            sampler=self.sampler, sampling=self.sampling, seed=self.seed, part=settings.part_length
        )

        def grow(groups: list[PartialGroup]) -> dict[Place, PartialCompletion]:
            rows = sum(len(group.completions) for group in groups)
            draw = partial(
                sampler.grow,
                policy,
                groups,
                progress=lambda tokens, finished: self._report("rollout", finished, rows, f"{tokens} tokens"),
                should_stop=self._should_stop,
            )
            return drawn_together(draw, policy, self.engine, self.collective)

        with stopwatch(seconds, "rollout"):
            advanced = carried.advance(
                step,
                self._data.steps,
                wanted=self._data.prompt_count,
                prompts_of=lambda step: self._data.prompts(step).prompts,
                group_size=self.algorithm.group_size,
                grow=grow,
                collective=self.collective,
                device=policy.device,
            )
        whole = sampler.whole(advanced.whole, step, policy.device)
        self._prove_parts(sampler, advanced.drawn, whole, seconds)
        return whole

    def _prove_parts(
        self,
        sampler: PartialSampler,
        drawn: Sequence[PartialGroup],
        otherwise: Samples,
        seconds: dict[str, float],
    ) -> None:
        """Holds the tokens that this step drew to the policy, whether their groups are whole or not."""
        if self.engine.weights_version is None:
            return
        policy, updates = self.require_policy(), self._data.completed_rollouts
        rows = [(group.prompt, row) for group in drawn for row in group.completions if updates in row.versions]
        some = rows[:: max(1, len(rows) // ROWS)][:ROWS]
        with stopwatch(seconds, "sync_proof"):
            samples = replace(otherwise, rollout=sampler.rollout(some, 1, policy.device)) if some else otherwise
            found = compare(
                policy,
                samples,
                self.engine.weights_version,
                self.sampling.temperature,
                self.collective,
                only=updates,
            )
        self._sync_proof.judge(found, policy, self.engine, step=otherwise.step, expected=updates)

    # --- rollouts ahead ---------------------------------------------------------------------------------------------

    def _rollout_ahead(self, collector: Collector, batch: PromptBatch, seconds: dict[str, float]) -> Ahead | None:
        """The rollout of a step from weights of ``data.staleness`` updates ago, proved; None where none is old.

        That of ``staleness`` steps later is launched first, so that the engine goes on at once; where dynamic sampling
        may need further attempts of this step, it is launched after those.
        """
        if self._pipeline is None:
            if self._stored_rollouts:
                rank_zero_warn("data.staleness is 0: rollouts that the checkpoint holds are drawn again.")
                self._stored_rollouts = []
            return None
        step = batch.step
        if self._stored_rollouts:
            self._pipeline.load_state_dict(self._stored_rollouts, self.collective, self.device)
            self._stored_rollouts = []
        self._launch(collector, step + self._data.staleness - self.algorithm.dynamic_sampling)
        rows = len(batch.prompts) * self.algorithm.group_size
        with stopwatch(seconds, "wait"):
            ahead = self._pipeline.take(
                step,
                self.collective,
                self.device,
                lambda tokens, finished: self._report("rollout", finished, rows, f"{tokens} tokens"),
                self._should_stop,
            )
        with stopwatch(seconds, "sync_proof"):
            found = self._compared(ahead)
        self._sync_proof.judge(found, self.require_policy(), self.engine, step=step, expected=ahead.version)
        return ahead

    def _launch(self, collector: Collector, last: int) -> None:
        """Begins to draw the rollouts up to that of step ``last``, as far as they are not under way."""
        assert self._pipeline is not None
        policy, mine = self.require_policy(), replace(collector, sampler=self._sampler_of_thread)
        greedy = self.algorithm.needs_greedy_baseline and not self.algorithm.dynamic_sampling
        for step in range(self._data.completed_rollouts, min(last + 1, self._data.steps)):
            if step not in self._pipeline:
                prompts = self._data.prompts(step).prompts
                self.collective.interruptible(partial(check_plain, prompts), self.device)
                self._pipeline.launch(step, policy, partial(mine.draw_step, policy, prompts, step, greedy))

    @property
    def _sampler_of_thread(self) -> CompletionSampler:
        """With a tokenizer of its own, for tokenizers serve one thread at a time."""
        if self._tokenizer_of_thread is None:
            self._tokenizer_of_thread = deepcopy(self.tokenizer)
        return replace(self.sampler, tokenizer=self._tokenizer_of_thread)

    def _compared(self, ahead: Ahead) -> Comparison:
        """What the policy of its launch makes of a rollout; asked once, since those weights are dropped then."""
        if ahead.sync is None:
            policy, (samples, _) = self.require_policy(), ahead.drawn.result()
            assert ahead.weights is not None
            now = ahead.version == self._data.completed_rollouts
            # the precision of steps, for checkpoints are saved between them
            precision = self.trainer.precision_plugin.forward_context()
            with precision, nullcontext() if now else earlier_weights(policy, ahead.weights):
                ahead.sync = compare(policy, samples, None, self.sampling.temperature, self.collective)
            ahead.weights = None
        assert ahead.sync is not None
        return ahead.sync

    def _prove(self, collected: Collected, only: int | None) -> None:
        temperature = self.sampling.temperature
        self._sync_proof.check(self.require_policy(), collected, self.engine, temperature, self.collective, only=only)

    def finish_rollouts(self, *, store: bool = False) -> dict[int, str]:
        """Waits for the rollouts that are drawn ahead; once the run is told to stop, for 30 s at most. All ranks call.

        Args:
            store: for a checkpoint. Those from the weights that the policy still has are left out, since they can be
                drawn again; the others are compared with the policy of their launch, which no checkpoint holds.

        Returns:
            Steps whose rollouts are lost, or not from the weights that they should be from, and why, in one line.
        """
        if self._pipeline is None:
            return {}
        updates = self._data.completed_rollouts if store else None
        lost = self._pipeline.finish(updates, self.collective, self.device, self._should_stop)
        if lost or not store:
            return lost
        policy, holds = self.require_policy(), self._sync_proof.holds
        found = [(ahead, self._compared(ahead)) for ahead in self._pipeline.pending]
        with self.trainer.precision_plugin.forward_context():
            wrong = [one for one, sync in found if not holds(sync, policy, self.engine, expected=one.version)]
        return {ahead.step: "it was not drawn from the policy's weights" for ahead in wrong}

    def _wait_for_engine(self) -> None:
        """Until it works for nobody else; raises what a rollout that was drawn ahead has failed by."""
        if self.finish_rollouts():
            assert self._pipeline is not None
            self._pipeline.raise_failure(self.collective, self.device)

    def _gathered_for_engine(self) -> AbstractContextManager[None]:
        """Whole weights of a sharded policy for an engine that reads them; others gather a part at a time."""
        in_process = self.engine.weights_version is None
        return gathered(self.require_policy()) if in_process else nullcontext()

    def update(self, experience: Experience) -> UpdateResult:
        """Advantage → loss → update."""
        optimizer = cast(torch.optim.Optimizer, self.optimizers())
        self.optimization.configure(optimizer, rollout=experience.samples.step, total=self._data.steps)
        update = PolicyUpdate(
            algorithm=self.algorithm,
            optimization=self.optimization,
            temperature=self.sampling.temperature,
            max_completion_length=self.longest_completion,
            budget=self.budget,
            seed=self.seed,
            collective=self.collective,
            report=self._report,
        )
        return update.run(self.require_policy(), optimizer, experience, self._backward)

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

    # --- validation -------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self.engine.updates = self._data.completed_rollouts
        self._wait_for_engine()
        self._noted = {}
        self._held_out = HeldOutMetrics(self.validation, self._data.held_out_groups(), self.device)

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        assert self._held_out is not None
        sampling = self.validation.sampling(self.sampling)
        sampled = self._answer(batch, self.validation.samples, sampling)
        greedy = self._answer(batch, 1, replace(sampling, temperature=0.0)) if self.validation.greedy else None
        self._held_out.update(batch, sampled, greedy)

    def on_validation_epoch_end(self) -> None:
        assert self._held_out is not None
        self.held_out, self.unjudged = self._held_out.results(), self._held_out.unjudged()
        self.log("step", float(self._data.completed_rollouts), on_epoch=True)
        self.log_dict({key: found.mean for key, found in self.held_out.items()}, on_epoch=True)
        taken = {key.removeprefix("val/") for key in [*self.held_out, "val/unjudged"]}
        noted = noted_means(self._noted, self.collective, taken)
        self.log_dict({f"val/{name}": mean for name, mean in noted.items()}, on_epoch=True)
        self.log_dict({f"{group}/unjudged": float(count) for group, count in self.unjudged.items()}, on_epoch=True)

    def _answer(self, batch: PromptBatch, samples: int, sampling: SamplingParams) -> Answers:
        """Completions of held-out problems. Keys do not name the training step, so validations of one run draw with
        common random numbers and differ by the weights alone."""
        rows = len(batch.prompts) * samples
        draw = partial(
            self.sampler.sample,
            self.require_policy(),
            batch.prompts,
            group_size=samples,
            sampling=sampling,
            seed=self.seed,
            split="val",
            progress=lambda tokens, finished: self._report("validate", finished, rows, f"{tokens} tokens"),
            should_stop=self._should_stop,
        )
        with self._gathered_for_engine():
            drawn = drawn_together(draw, self.require_policy(), self.engine, self.collective)
        state = partial(trainer_state, self._data.completed_rollouts, self._data.steps, self.collective.rank)
        answers = self.collective.scored(
            lambda: grade(self.rewards, drawn, vote=samples > 1, trainer_state=state), self.device
        )
        for name, values in answers.noted.items():
            self._noted.setdefault(name, []).extend(values)
        return answers

    # --- bookkeeping ------------------------------------------------------------------------------------------------

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

    def _should_stop(self) -> bool:
        return any(callback.should_stop() for callback in self._step_callbacks)

    def _needs_start_weights(self) -> bool:
        """A checkpoint brings the policy's weights; a reference is always the policy's start."""
        return self.trainer.ckpt_path is None or (self.algorithm.needs_reference and self.trainer.training)

    def _log_step(self, experience: Experience, result: UpdateResult, seconds: dict[str, float]) -> None:
        metrics = experience_metrics(experience, self.rewards, self.collective, self.reflection_words)
        self._warn_of_broken_rewards(broken_share(metrics, self.rewards, experience.lengths.numel()))
        metrics |= self.collective.ratios(result.sums)
        for callback in self._step_callbacks:
            metrics |= callback.step_metrics(self.trainer, self, experience)
        metrics |= self._sync_proof.metrics
        if self._pipeline is not None or self._carried is not None:
            metrics |= staleness(experience, self.collective)
        if self._carried is not None:
            metrics["rollout/carried_completions"] = float(self._carried.waiting)
        self._tokens_seen += int(experience.lengths.sum())
        metrics |= {
            "num_tokens": float(self._tokens_seen),
            "lr": self.optimization.lr_at(experience.samples.step, self._data.steps),
            "updates/skipped": float(result.skipped),
            "step_time": seconds["step"],
            **{f"time/{stage}": value for stage, value in (experience.seconds | result.seconds).items()},
        }
        for name, values in (("loss", result.losses), ("grad_norm", result.grad_norms)):
            if values:
                metrics[name] = sum(values) / len(values)
        metrics |= noted_means(experience.scored.metrics, self.collective, {*metrics, "step"})
        self.log_dict(metrics, on_step=True, on_epoch=False, logger=False, batch_size=len(experience.keep))
        for logger in self.loggers:  # Lightning's own way would repeat old values of names that are missing today
            logger.log_metrics(metrics, step=experience.samples.step + 1)

    def _warn_of_broken_rewards(self, share: float) -> None:
        if share > 0.01 and not self._warned_of_rewards:
            self._warned_of_rewards = True
            rank_zero_warn(
                f"Judging {share:.1%} of the completions of this step timed out, was killed or crashed; they score 0. "
                "Read them in completions.jsonl: the policy may have found answers that cost the judge too much."
            )

    def _warn_of_failed_episodes(self, share: float, detail: str) -> None:
        if share > 0.01 and not self._warned_of_episodes:
            self._warned_of_episodes = True
            rank_zero_warn(
                f"{share:.1%} of the episodes of this step have no value and leave the loss; the first: {detail} "
                "(episodes/status/… count them)."
            )

    def _check_divergence(self, result: UpdateResult) -> None:
        """Counts updates in a row that were skipped.

        Raises:
            TrainingDiverged: as many as ``optimization.max_skipped_updates``.
        """
        if not result.skipped:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += result.skipped
        rank_zero_warn(f"{result.skipped} update(s) skipped: loss or gradient was not finite.")
        if self._skipped_in_a_row >= self.optimization.max_skipped_updates:
            raise TrainingDiverged(
                f"{self._skipped_in_a_row} updates in a row had a loss or gradient that is not finite. "
                "Lower optimization.lr or raise its warmup_rollouts."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["characters"] = self.policy_config.characters
        checkpoint["tokens_seen"] = self._tokens_seen
        checkpoint["token_budget"] = self.budget.state_dict()
        checkpoint["skipped_in_a_row"] = self._skipped_in_a_row
        checkpoint["rollouts"] = self._rollouts_to_store()
        checkpoint["carried"] = {} if self._carried is None else self._carried.state_dict()
        checkpoint["reference"] = {} if self._reference is None else self._reference.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        characters = self.policy_config.characters
        if checkpoint.get("characters", characters) != characters:
            raise ValueError(
                "the checkpoint was trained with other policy.characters: give those of the config.yaml of its run."
            )
        self._tokens_seen, self._skipped_in_a_row = checkpoint["tokens_seen"], checkpoint["skipped_in_a_row"]
        self.budget.load_state_dict(checkpoint.get("token_budget", TokenBudget().state_dict()))
        self._stored_rollouts = checkpoint.get("rollouts", [])
        if self.trainer.training and self._data.staleness > 0:
            check_stored(
                self._stored_rollouts,
                group_size=self.algorithm.group_size,
                prompts=self._data.prompt_count,
                episodes=self.environment is not None,
            )
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

    def _rollouts_to_store(self) -> list[dict[str, Any]]:
        if lost := self.finish_rollouts(store=True):
            raise CheckpointError(f"rollouts that were drawn ahead are lost, by step: {lost}.")
        if self._pipeline is None or self._stored_rollouts:  # before the first step they are those of the checkpoint
            return self._stored_rollouts
        return self._pipeline.state_dict(self.collective, int(self.tokenizer.pad_token_id))
