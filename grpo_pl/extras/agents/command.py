"""``grpo-pl agent``: one session of an agent with a trained policy, call by call, as a training would record it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_pl.environment import Observation, text_of

if TYPE_CHECKING:
    from grpo_pl.extras.agents.episode_rows import Episode
    from grpo_pl.types import Rollout

_CHOICES = ("rewarded_by", "on_agent_error", "on_rewrite")


def agent(
    try_: str | None = None,
    model: str | None = None,
    question: str = "1+2=",
    answer: str = "",
    temperature: float | None = None,
    max_turns: int = 8,
    seed: int = 0,
    device: str = "auto",
    rewarded_by: Literal["rewards", "agent"] | None = None,
    trust_rewards: bool = False,
) -> int:
    """Plays one session of an agent and prints its calls, the rows of tokens, the masks and the reward.

    The exit status is 1 if the session would be left out of a training; the reason is printed.

    Args:
        try_: the agent, file.py:function or module:function; run(task, base_url, api_key).
        model: exported folder, run folder or checkpoint that answers.
        question: task["question"].
        answer: task["answer"].
        temperature: of the answers; by default the one of training, 0 is greedy.
        max_turns: most calls.
        seed: names the samples, and is task["seed"].
        device: cpu, cuda …; auto takes a GPU where there is one.
        rewarded_by: rewards or agent; by default as in the training of the model if that was one of an agent, else
            rewards.
        trust_rewards: let the model name any class: only if you know who wrote it.
    """
    if try_ is None or model is None:
        raise ValueError("give --try my_agent.py:run and --model, an exported folder, a run folder or a checkpoint.")
    from grpo_pl.cli.answering import load_answerer
    from grpo_pl.extras.agents.openai_agent import AgentEnvironment
    from grpo_pl.extras.agents.pool import EnvironmentPool
    from grpo_pl.policy.trained import find_model
    from grpo_pl.types import Problem

    trained = find_model(Path(model), trust_rewards=trust_rewards)
    # of what files of others say, choices alone: no interpreter and no variables
    judged = {name: str(value) for name, value in _settings(trained.environment).items() if name in _CHOICES}
    if rewarded_by is not None:
        judged["rewarded_by"] = rewarded_by
    environment = AgentEnvironment(agent=try_, parser=trained.tools.parser, **judged)  # type: ignore[arg-type]
    answerer = load_answerer(replace(trained, environment=None), device, temperature=temperature)
    episodes = replace(answerer.sampler.episodes, max_turns=max_turns)
    with EnvironmentPool(environment, episodes) as pool:
        sampler = replace(answerer.sampler, pool=pool, episodes=episodes)
        problem = Problem(id=0, question=question, answer=answer)
        drawn = replace(answerer, sampler=sampler).sample([problem], samples=1, seed=seed)
    assert drawn.episodes is not None
    (episode,) = drawn.episodes
    _print_calls(episode)
    _print_row(drawn.rollout)
    if episode.value is None:
        print(f"left out: {episode.status}: {episode.detail or 'the policy was never asked'}")
        return 1
    why = "" if episode.status == "ok" else f" ({episode.status}: {episode.detail})"
    if environment.pays:
        print(f"reward {episode.value:g}{why}, ended by {episode.finish_reason}")
        return 0
    print(f"ended by {episode.finish_reason}{why}; the rewards of {model} judge {drawn.completions[0]!r}:")
    for reward, (score,) in zip(answerer.rewards, answerer.judge(drawn).scores, strict=True):
        print(f"  {reward.name}: {'no value' if score.value is None else f'{score.value:g}'} ({score.status})")
    return 0


def _settings(environment: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Those of the training's agent; none if it had no agent."""
    kind = "" if environment is None else str(environment.get("class_path")).rpartition(".")[2]
    if environment is None or kind not in ("AgentEnvironment", "VerifiersEnvironment", "InspectEnvironment"):
        return {}
    paid = {} if kind == "AgentEnvironment" else {"rewarded_by": "agent"}  # which those two do not let be set
    return {**(environment.get("init_args") or {}), **paid}


def _print_calls(episode: Episode) -> None:
    tools = [tool["function"]["name"] for tool in episode.start.info.get("tools", ())]
    print(f"tools: {', '.join(tools) or 'none'}")
    heard: Observation = episode.start.observation
    for number, turn in enumerate(episode.turns):
        where = f", segment {turn.segment}" if any(each.segment for each in episode.turns) else ""
        print(f"call {number}{where}: {text_of(heard)!r}")
        print(f"  policy ({turn.finish_reason}): {turn.action!r}")
        heard = turn.transition.observation


def _print_row(rollout: Rollout) -> None:
    """The tokens behind the prompt of each segment, a run of equal masks at a time."""
    import torch

    from grpo_pl.policy.packing import Rows

    rows = Rows.of(rollout, torch.tensor([0])).unfolded()
    for number, prompt in enumerate(rows.prompt_mask):
        mask = rows.scored[number][rows.completion_mask[number]].tolist()
        runs = [(written, len(list(run))) for written, run in groupby(mask)]
        told = " ".join(f"{count} {'action' if written else 'observation'}" for written, count in runs)
        name = f"segment {number}" if len(rows.prompt_mask) > 1 else "row"
        print(f"{name}: {int(prompt.sum())} prompt tokens, then {told}; {sum(mask)} of {len(mask)} train")
