"""``PolicyModule``: the half of `GRPOModule` that needs no training: it loads policy, rewards and engine, and answers
held-out problems. Not for use alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, cast, get_type_hints

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from grpo_pl.config.objects import build
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.sharding import build_once
from grpo_pl.environment import Environment
from grpo_pl.evaluation.held_out import Answers, HeldOutMetrics, MetricResult, Validation, grade
from grpo_pl.functional.sampling import DRAW_RULE
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig, context_length, load_model, load_tokenizer
from grpo_pl.policy.logprobs import tried_mode, use_forward_mode
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.trained import SETTINGS, NoSettings, ServedModel, find_model
from grpo_pl.rewards.base import Reward, correctness_index
from grpo_pl.rewards.trust import Untrusted, refuse_own_classes
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.rollout.native.decoder_choice import TORCH, decoder_for_run
from grpo_pl.rollout.sampler import CompletionSampler
from grpo_pl.training.cold_start import ColdStart
from grpo_pl.training.collect import Collector, DrawRequest, trainer_state
from grpo_pl.training.demonstrated import DemonstrationBatches
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.metrics import logged_means
from grpo_pl.training.stage import Stage
from grpo_pl.training.vocabulary import with_collected_characters
from grpo_pl.types import Problem, PromptBatch, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_pl.extras.agents.pool import EnvironmentPool


class PolicyModule(LightningModule):
    """Answers held-out problems in ``Trainer.validate``, ``test`` and ``predict``, and is loaded from checkpoints.

    Its attributes are arguments of ``GRPOModule``, which sets them.
    """

    policy_config: PolicyConfig
    rewards: list[Reward]
    template: PromptTemplate
    algorithm: GRPOAlgorithm
    cold_start: ColdStart | None
    demonstrations: DemonstrationBatches | None
    environment: Environment | None
    episodes: EpisodeSettings
    pool: EnvironmentPool | None
    """Plays episodes; closed when a fit or validation ends, however it ends."""
    engine: RolloutEngine
    sampling: SamplingParams
    validation: Validation
    seed: int

    def __init__(self) -> None:
        super().__init__()
        self.decoder: str | None = None
        """The native engine's decoder in the whole run, on all ranks (see `choose_decoder`); None before a fit."""
        self.policy: PreTrainedModel | None = None
        self.settings: dict[str, Any] | None = None
        """Arguments of the module as plain values, for its checkpoints; None for one that is made in Python."""
        self.held_out: dict[str, MetricResult] = {}
        """Results of the last validation, by metric key."""
        self.unjudged: dict[str, int] = {}
        """By group: how many completions of the last validation could not be judged, and count nowhere."""
        self.held_out_counts: dict[str, dict[int, tuple[int, int]]] = {}
        """By group and problem id: right and judged completions of the last validation."""
        self._held_out: HeldOutMetrics | None = None
        self._answered = self._to_answer = 0  # held-out completions of this process, in a validation

    @staticmethod
    def _pool_of(environment: Environment | None, episodes: EpisodeSettings) -> EnvironmentPool | None:
        if environment is None:
            return None
        from grpo_pl.extras.agents.pool import EnvironmentPool

        return EnvironmentPool(environment, episodes)

    def require_policy(self) -> PreTrainedModel:
        """The policy, once ``configure_model`` has run."""
        assert self.policy is not None, "configure_model has not run"
        return self.policy

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The policy's output for token ids: logits, as of a model of ``transformers``."""
        return self.require_policy()(*inputs, **named)

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
    def collector(self) -> Collector:
        """Draws and scores completions of the policy as it is."""
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
    def longest_completion(self) -> int:
        """Most tokens that the policy writes in a completion or an episode."""
        length = self.sampling.max_completion_length
        if self.environment is None:
            return length
        context = None if self.policy is None else context_length(self.policy.config)
        return self.episodes.most_actions(self.sampling, context)

    def teardown(self, stage: str) -> None:
        """Ends what draws and plays, however a fit or validation ends."""
        from grpo_pl.training.forked_fit import send_results

        send_results(self)
        self.engine.close()
        if self.pool is not None:
            self.pool.close()

    def _choose_decoder(self) -> None:
        """All ranks draw with what rank 0 would, and a resumed run with what it drew with before, where it is there."""
        drawing = self.engine.drawing_engine
        if not drawing.native:
            return
        policy, stops = self.require_policy(), bool(self.sampling.stop)
        with self.trainer.precision_plugin.forward_context():
            chosen, line = decoder_for_run(policy, self.sampling, stop_strings=stops, recorded=self.decoder)
        self.decoder = cast(Any, drawing).decoder = self.collective.gather_objects(chosen)[0]
        if line is not None:
            rank_zero_warn(line)

    def _wait_for_engine(self) -> None:
        """Waits until the engine works for nobody else."""

    # --- loading ----------------------------------------------------------------------------------------------------

    @property
    def stage(self) -> Stage | None:
        """The environment for the demonstrations of a cold start."""
        if self.environment is None:
            return None
        return Stage(environment=self.environment, plain=self.episodes.plain_turns, limits=self.episodes)

    @property
    def _start(self) -> ColdStart | None:
        """The cold start of this run, cut to two steps by ``trainer.fast_dev_run``."""
        start = self.cold_start
        return start.shortened() if start is not None and self.trainer.fast_dev_run else start  # type: ignore[attr-defined]

    def _resolve_characters(self) -> None:
        """Collects what ``policy.characters: from_data`` stands for, unless the command line has done so."""
        self.policy_config = with_collected_characters(
            self.policy_config, self.template, self._data, self.cold_start, self.stage, self.demonstrations
        )

    def _needs_start_weights(self) -> bool:
        """A checkpoint brings the policy's weights; a reference, and a teacher of that kind, is the policy's start."""
        frozen = self.policy_config.quantization is not None  # a checkpoint holds what was trained alone
        return (
            frozen or self.trainer.ckpt_path is None or (self.algorithm.needs.start_weights and self.trainer.training)
        )

    def _load_policy(self, *, sharded: bool) -> None:
        """Loads tokenizer and policy; its weights are those of the cold start, where there is one."""
        if sharded:
            self.policy_config.check_sharding()
        self._resolve_characters()
        self.tokenizer = load_tokenizer(self.policy_config)
        needs_weights = self._needs_start_weights()
        path = None
        if (start := self._start) is not None and needs_weights:
            made_from = (self.policy_config, self.template, self._data.source, self.stage)
            path = str(start.folder(*made_from, trainer=self.trainer))
        build = partial(load_model, self.policy_config, self.tokenizer, path)
        self.policy = build_once(build) if sharded else build(weights=needs_weights)

    # --- validate, test and predict ---------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        if getattr(self.engine.drawing_engine, "decoder", TORCH) is None:  # outside a fit
            self._choose_decoder()

    def on_validation_epoch_start(self) -> None:
        self._begin_held_out(self.trainer.num_val_batches)

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Answers | None]:
        """Callbacks get what this returns, in ``on_validation_batch_end``."""
        assert self._held_out is not None
        sampling = self.validation.sampling(self.sampling)
        greedily = replace(sampling, temperature=0.0)
        policy = self.require_policy()
        sampled = self.answer(policy, batch.prompts, self.validation.samples, sampling)
        self._answered += sampled.correct.numel()
        greedy = self.answer(policy, batch.prompts, 1, greedily) if self._answers_greedily else None
        self._answered += 0 if greedy is None else greedy.correct.numel()
        self._held_out.update(batch, sampled, greedy)
        return {"sampled": sampled, "greedy": greedy}

    def on_validation_epoch_end(self) -> None:
        self._log_held_out("val")

    on_test_start = on_predict_start = on_validation_start

    def on_test_epoch_start(self) -> None:
        self._begin_held_out(self.trainer.num_test_batches)

    def test_step(self, batch: PromptBatch, batch_idx: int) -> dict[str, Answers | None]:
        """As `validation_step`."""
        return self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._log_held_out("test")

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
                "correct": bool(correct) if judged and correctness_index(self.rewards) is not None else None,
            }
            for problem, valid, completion, correct, judged in zip(*columns, strict=True)
            if valid  # or it fills up the share of a process
        ]

    def answer(
        self, policy: PreTrainedModel, problems: Sequence[Problem], samples: int, sampling: SamplingParams
    ) -> Answers:
        """Graded completions of this rank's held-out problems; all ranks call it together. Keys do not name the step,
        so validations of one run draw with common random numbers and differ by the weights alone."""
        collector = self.collector
        draw = partial(
            collector.sampler.sample,
            prompts=problems,
            group_size=samples,
            sampling=sampling,
            seed=self.seed,
            split="val",
        )
        drawn = collector.draw(policy, DrawRequest(draw, len(problems) * samples, "validate"))
        state = partial(trainer_state, self._data.completed_rollouts, self._data.steps, self.collective.rank)
        return self.collective.scored(
            lambda: grade(self.rewards, drawn, vote=samples > 1, trainer_state=state), policy.device
        )

    def answer_greedily(self, problems: Sequence[Problem]) -> Answers:
        """A graded greedy completion of each problem, between two steps; all processes call it together, and it changes
        nothing of the run."""
        self.engine.updates = self._data.completed_rollouts
        self._answered = self._to_answer = 0
        sampling = replace(self.validation.sampling(self.sampling), temperature=0.0)
        with self.trainer.precision_plugin.forward_context():
            return self.answer(self.require_policy(), problems, 1, sampling)

    def _begin_held_out(self, batches_of_loaders: Sequence[int | float]) -> None:
        self.engine.updates = self._data.completed_rollouts
        groups = self._data.held_out_groups()
        self._held_out = HeldOutMetrics(self.validation, self.rewards, groups, self.device)
        self._answered = 0
        batches = int(sum(batches_of_loaders))  # fewer with trainer.limit_val_batches
        self._to_answer = self._data.held_out_share(batches) * (self.validation.samples + self._answers_greedily)

    @property
    def _answers_greedily(self) -> bool:
        """True if each held-out problem is answered greedily as well, which only a correctness reward can judge."""
        return self.validation.greedy and correctness_index(self.rewards) is not None

    def _log_held_out(self, stage: str) -> None:
        """Logs what was found, as ``val/…`` or ``test/…``."""
        assert self._held_out is not None
        self.held_out, self.unjudged = self._held_out.results(), self._held_out.unjudged()
        self.held_out_counts = self._held_out.counts()
        numbers = {key: found.mean for key, found in self.held_out.items()}
        taken = {key.removeprefix("val/") for key in [*self.held_out, "val/unjudged"]}
        noted = logged_means(self._held_out.noted, self.collective, taken)
        numbers |= {f"val/{name}": mean for name, mean in noted.items()}
        numbers |= {f"{group}/unjudged": float(count) for group, count in self.unjudged.items()}
        self.log("step", float(self._data.completed_rollouts), on_epoch=True)
        self.log_dict({stage + key.removeprefix("val"): number for key, number in numbers.items()}, on_epoch=True)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.settings is not None:
            checkpoint[SETTINGS] = self.settings
        checkpoint |= {"characters": self.policy_config.characters, "draw_rule": DRAW_RULE, "decoder": self.decoder}
        checkpoint["forward_mode"] = tried_mode(self.policy)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        characters = self.policy_config.characters
        if checkpoint.get("characters", characters) != characters:
            raise ValueError(
                "the checkpoint was trained with other policy.characters: give those of the config.yaml of its run."
            )
        use_forward_mode(self.policy, checkpoint.get("forward_mode"))
        self.decoder = checkpoint.get("decoder", TORCH)  # before there was a kernel, torch drew
        if getattr(self.engine, "decoder", None) is not None:  # of a sharded one, read after the start of a fit
            self._choose_decoder()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of every module; after a fit in forked processes (``ddp_notebook``) also the policy itself, which this
        process has not loaded."""
        from grpo_pl.training.forked_fit import take_results

        return super().load_state_dict(take_results(self, state_dict), strict, assign)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise ValueError(
                f"{type(self).__name__} goes to a process that is spawned, as by trainer.strategy ddp_spawn, and what "
                "is trained there ends with it: set ddp in a script, or ddp_notebook in a notebook."
            )
        return dict(super().__getstate__())

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
            fields: values that take the place of the run's own, such as ``validation={"samples": 4}``. A checkpoint of
                a run that was made in Python, as by ``Trainer.save_checkpoint``, holds no settings: give ``policy``,
                ``rewards`` and whatever else differs from the defaults.

        Raises:
            ValueError: no settings, and no ``policy`` and ``rewards`` either, settings that name a class outside
                grpo_pl (``Untrusted``), or weights of another policy.
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
        except NoSettings as error:
            if not {"policy", "rewards"} <= fields.keys():
                raise ValueError(f"{error} Give the policy and rewards of the run as arguments.") from error
            return cls._from_weights(Path(checkpoint_path), str(map_location or "cpu"), fields)
        except Untrusted as error:
            raise Untrusted(f"{checkpoint_path}: {error} Here that is weights_only=False.") from error
        if found.checkpoint is None:
            raise ValueError(f"{checkpoint_path} is no checkpoint: give a file of the run's folder checkpoints.")
        settings = {**found.settings, "engine": None, "cold_start": None, **fields}
        module: Self = build(cls, settings, "model")
        module.tokenizer, module.decoder = found.tokenizer, found.decoder or None
        module.policy = found.load_policy(str(map_location or "cpu"))
        return module

    @classmethod
    def _from_weights(cls, file: Path, device: str, fields: Mapping[str, Any]) -> Self:
        """The module of ``fields``, which are objects or plain values, with the policy of a checkpoint."""
        from grpo_pl.files.sharded_checkpoints import read_checkpoint

        def built(name: str, value: Any) -> Any:
            first = value[0] if isinstance(value, list) and value else value
            if not isinstance(first, Mapping):
                return value
            # a subclass's may pass on **kwargs
            for init in (vars(kind)["__init__"] for kind in cls.__mro__ if "__init__" in vars(kind)):
                if name in (types := getattr(init, "__annotations__", {})):  # of others a type may not be importable
                    hints = get_type_hints(SimpleNamespace(__annotations__={name: types[name]}), init.__globals__)
                    return build(hints[name], value, name)
            return value

        module = cls(**{name: built(name, value) for name, value in fields.items()})
        state = read_checkpoint(file)
        module.policy_config = replace(module.policy_config, characters=state.get("characters"))
        found = ServedModel(
            name=file.stem,
            source=file,
            checkpoint=file,
            policy=module.policy_config,
            template=module.template,
            sampling=module.sampling,
            rewards=[],
        )
        module.tokenizer, module.decoder = found.tokenizer, state.get("decoder")
        module.policy = found.load_policy(device)
        return module

    # --- the Trainer and its callbacks ------------------------------------------------------------------------------

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
        if stage == "validate" and self._to_answer:  # count over all batches; the note is of this one alone
            done, total, note = self._answered + done, self._to_answer, ""
        for callback in self._step_callbacks:
            callback.on_stage_progress(stage, done, total, note)

    def _report_cold_start(self, done: int, total: int, *, loss: float, lr: float) -> None:
        """To callbacks; to loggers a hundred points or so, whose steps count up to -1, for rollouts begin at 0."""
        self._report("cold start", done, total, f"loss {loss:.3f}")
        if (total - done) % max(1, total // 100) == 0:
            for logger in self.loggers:
                logger.log_metrics({"cold_start/loss": loss, "cold_start/lr": lr}, step=done - total - 1)

    def _should_stop(self) -> bool:
        return any(callback.should_stop() for callback in self._step_callbacks)
