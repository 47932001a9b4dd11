"""``CompletionSampler``: questions in, completions or episodes as tokens and as the text that rewards read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch

from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.inputs import EncodedPrompt, asked_of, encode_prompt, encode_prompts, has_pictures, reader_of
from grpo_pl.policy.loading import context_length
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rollout.engine import RolloutEngine, Watching, generate_request
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.types import NO_VERSION, Draw, GenerateRequest, Problem, Rollout, SampleKey, SamplingParams, Split

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_pl.extras.agents.episode_rows import Episode
    from grpo_pl.extras.agents.pool import EnvironmentPool


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A rollout beside its texts; the rows of both are in the order of ``Rollout``."""

    prompts: Sequence[Problem]  # P
    prompt_texts: Sequence[str]  # P
    rollout: Rollout
    completions: Sequence[str]  # B, the template's prefill included; of episodes what `rewards_see` says
    step: int
    episodes: Sequence[Episode] | None = None  # B; None where nothing was played

    @property
    def per_row(self) -> list[Problem]:
        """The prompt of each of the B rows."""
        return [prompt for prompt in self.prompts for _ in range(self.rollout.group_size)]

    def columns(self, needs: Collection[str] = ()) -> dict[str, list[object]]:
        """The columns that rewards get beside completion and answer: those of the data set, prompt texts and lengths.

        Args:
            needs: what the rewards ask for, see ``Reward.needs``; with ``completion_ids`` the tokens as they were
                drawn, end tokens included and observations left out.
        """
        rows = self.per_row
        names = {name for prompt in self.prompts for name in prompt.columns}
        columns: dict[str, list[object]] = {name: [row.columns.get(name) for row in rows] for name in sorted(names)}
        columns["prompt"] = [text for text in self.prompt_texts for _ in range(self.rollout.group_size)]
        columns["question"] = [row.question for row in rows]
        if any(prompt.messages is not None for prompt in self.prompts):
            columns["prompt_messages"] = [
                [{"role": "user", "content": row.question}] if row.messages is None else list(map(dict, row.messages))
                for row in rows
            ]
        # the part of a mixture; without one, a column of that name is the data set's own
        columns["source"] = [row.source or row.columns.get("source", "") for row in rows]
        columns["completion_length"] = self.rollout.action_lengths.tolist()
        if "completion_ids" in needs:
            written = zip(self.rollout.completion_ids, self.rollout.action_mask, strict=True)
            columns["completion_ids"] = [ids[mask].tolist() for ids, mask in written]
        if self.episodes is not None:
            columns["episode"] = list(map(episode_row, self.episodes))
        return columns


def episode_row(episode: Episode) -> dict[str, Any]:
    """An episode as plain values: what rewards read in the column ``episode``, and files keep."""
    several = any(turn.segment for turn in episode.turns)
    return {
        "return": episode.value,
        "status": episode.status,
        "detail": episode.detail,
        "finish_reason": episode.finish_reason,
        "observation": episode.start.observation,
        **{name: info for name, info in episode.start.info.items() if name == "tools"},  # of an agent's own prompt
        "turns": [
            {
                "action": turn.action,
                "observation": turn.transition.observation,
                "reward": turn.transition.reward,
                "invalid_action": turn.transition.invalid_action,
                "finish_reason": turn.finish_reason,
                **({"segment": turn.segment} if several else {}),
            }
            for turn in episode.turns
        ],
    }


@dataclass(frozen=True, kw_only=True)
class CompletionSampler:
    """Template, tokenizer and engine as one: the same path for training, validation, prediction and serving."""

    engine: RolloutEngine
    template: PromptTemplate
    tokenizer: PreTrainedTokenizerBase
    pool: EnvironmentPool | None = None
    """Plays the environment that the policy acts in; None draws completions of a single turn."""
    episodes: EpisodeSettings = field(default_factory=EpisodeSettings)

    @property
    def dialogue(self) -> Dialogue:
        """The tokens between the turns of an episode."""
        dialogue = Dialogue(template=self.template, tokenizer=self.tokenizer, plain=self.episodes.plain_turns)
        return dialogue if self.pool is None else dialogue.within(self.pool.environment)

    def sample(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Problem],
        *,
        group_size: int,
        sampling: SamplingParams,
        seed: int,
        split: Split,
        step: int = 0,
        attempt: int = 0,
        first: int = 0,
        **watching: Unpack[Watching],
    ) -> Samples:
        """Draws ``group_size`` completions for every prompt, or plays as many episodes.

        Args:
            first: number of each group's first sample; with a ``group_size`` of 1 that sample is drawn alone.

        Raises:
            ValueError: a prompt and ``max_completion_length`` do not fit the model's context; or, with an environment,
                as ``run_episodes``.
            RolloutInterrupted: ``should_stop`` turned true.
        """
        draw: Draw = "greedy" if sampling.temperature == 0.0 else "sampled"
        key = SampleKey(seed=seed, split=split, step=step, attempt=attempt, prompt_id=0, sample=0, draw=draw)
        keys = [[replace(key, prompt_id=prompt.id, sample=first + i) for i in range(group_size)] for prompt in prompts]
        if self.pool is not None:
            from grpo_pl.extras.agents.episodes import run_episodes

            rollout, episodes = run_episodes(
                self.engine,
                model,
                dialogue=self.dialogue,
                pool=self.pool,
                problems=prompts,
                keys=keys,
                sampling=sampling,
                limits=self.episodes,
                **watching,
            )
            return self._episode_samples(prompts, self._with_version(rollout), episodes, step)
        encoded = self.encoded(model, prompts, sampling.max_completion_length)
        request = generate_request(
            model,
            self.tokenizer,
            prompt_ids=[prompt.ids for prompt in encoded],
            keys=keys,
            sampling=sampling,
            prefix=self.template.prefill,
            thought=self.template.thought(sampling, self.tokenizer),
            inputs=[prompt.inputs for prompt in encoded],
        )
        generate = self.engine.generate
        if request.thought is not None:
            from grpo_pl.rollout.thinking import draw_completions

            generate = partial(draw_completions, self.engine)
        return self.samples(prompts, self._with_version(generate(model, request, **watching)), step)

    def encoded(self, model: PreTrainedModel, prompts: Sequence[Problem], longest: int) -> list[EncodedPrompt]:
        """Each prompt as the model reads it.

        Raises:
            ValueError: one of them and a completion of ``longest`` tokens do not fit the model's context, or one holds
                what the policy cannot read, or the engine cannot hand on.
        """
        try:
            encoded = encode_prompts([(each.asked, each.columns) for each in prompts], self.template, self.tokenizer)
        except ValueError:  # of one among them, which is named
            encoded = list(map(self.encode, prompts))
        context = context_length(model.config)
        number, (ids, _) = max(enumerate(encoded), key=lambda prompt: len(prompt[1].ids))
        if not self.engine.supports_inputs and any(prompt.inputs is not None for prompt in encoded):
            raise ValueError(
                f"{type(self.engine).__name__} draws from text, and prompts have images: set model.engine null."
            )
        if context is not None and len(ids) + longest > context:
            raise ValueError(
                f"prompt {prompts[number].id} has {len(ids)} tokens; with max_completion_length={longest} that exceeds "
                f"the model's context of {context}. Shorten one of them."
            )
        return encoded

    def encode(self, problem: Problem) -> EncodedPrompt:
        """A problem's prompt as the model reads it.

        Raises:
            ValueError: it cannot, by the problem's number.
        """
        try:
            return encode_prompt(problem.asked, problem.columns, self.template, self.tokenizer)
        except ValueError as error:
            if reader_of(self.tokenizer) is None and not has_pictures(problem.columns):
                raise
            raise ValueError(f"prompt {problem.id}: {error}") from error

    def generate(self, model: PreTrainedModel, request: GenerateRequest, **watching: Unpack[Watching]) -> Rollout:
        """The engine's completions, with the version of the weights that they were drawn from."""
        return self._with_version(self.engine.generate(model, request, **watching))

    def samples(self, prompts: Sequence[Problem], rollout: Rollout, step: int) -> Samples:
        """A rollout of single turns beside its texts."""
        return Samples(
            prompts=prompts,
            prompt_texts=list(map(self._shown, prompts)),
            rollout=rollout,
            step=step,
            completions=self._texts(rollout),
        )

    def _shown(self, problem: Problem) -> str:
        return self.template.render(asked_of(problem.asked, problem.columns, self.tokenizer), self.tokenizer)

    def _with_version(self, rollout: Rollout) -> Rollout:
        """The rollout with the version of the weights that it was drawn from."""
        version = self.engine.updates if self.engine.weights_version is None else self.engine.weights_version
        return replace(rollout, policy_version=torch.where(rollout.action_mask, version, NO_VERSION))

    def _texts(self, rollout: Rollout) -> list[str]:
        """All that follows each prompt."""
        rows = zip(rollout.completion_ids.tolist(), rollout.lengths.tolist(), strict=True)
        return [self.template.completion_text(row[:length], self.tokenizer) for row, length in rows]

    def _episode_samples(
        self, prompts: Sequence[Problem], rollout: Rollout, episodes: Sequence[Episode], step: int
    ) -> Samples:
        size = rollout.group_size  # all episodes of a group begin alike, but for those that failed before a turn
        groups = [range(start, start + size) for start in range(0, len(episodes), size)]
        first = [next((row for row in group if episodes[row].turns), group[0]) for group in groups]
        asked = zip(rollout.prompt_ids[first], rollout.prompt_mask[first], strict=True)
        whole = self.episodes.rewards_see == "exchange"
        return Samples(
            prompts=prompts,
            prompt_texts=[str(self.tokenizer.decode(ids[mask].tolist())) for ids, mask in asked],
            rollout=rollout,
            step=step,
            completions=self._texts(rollout) if whole else [(["", *episode.actions])[-1] for episode in episodes],
            episodes=episodes,
        )
