"""Sessions of agents as rows of tokens: those of the same exchange with our own environments, whenever they answer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.extras.agents import Environment, EnvironmentPool
from grpo_pl.extras.agents.episode_rows import Episode
from grpo_pl.extras.agents.episodes import _Driver, run_episodes
from grpo_pl.extras.agents.openai_agent import AgentEnvironment
from grpo_pl.extras.agents.tool_calls import CallParser, HermesCalls, TagCalls
from grpo_pl.extras.agents.tools import ToolEnvironment
from grpo_pl.policy.dialogue import Dialogue, PlainTurns
from grpo_pl.policy.loading import PolicyConfig, load_model
from grpo_pl.policy.packing import Rows
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import Problem, Rollout, SamplingParams
from tests.conftest import ScriptedEngine
from tests.rollout.drawn import assert_same, make_keys

AGENTS = Path(__file__).parents[2] / "plugins" / "user_agents.py"
SHAPE: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
}


def play(
    environment: Environment,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    engine: RolloutEngine,
    *,
    rows: Sequence[dict[str, Any]] = ({},),
    group_size: int = 1,
    limits: EpisodeSettings = EpisodeSettings(max_turns=3),  # noqa: B008 - frozen
    length: int = 200,
) -> tuple[Rollout, list[Episode]]:
    problems = [Problem(id=p, question=f"{p + 1}+2=", answer="3", columns=row) for p, row in enumerate(rows)]
    with EnvironmentPool(environment) as pool:
        return run_episodes(
            engine,
            model,
            dialogue=Dialogue(template=PromptTemplate(), tokenizer=tokenizer, plain=limits.plain_turns).within(
                environment
            ),
            pool=pool,
            problems=problems,
            keys=make_keys(len(problems), group_size, seed=1, step=0, prompt_id=0),
            sampling=SamplingParams(max_completion_length=length),
            limits=limits,
        )


def chatty(template: str | None) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    return tokenizer, load_model(PolicyConfig(from_scratch=SHAPE), tokenizer)


CHAT = (
    "{% if tools %}[tools]{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "parser", "call"),
    [
        (None, TagCalls(), "<calc>1+2</calc>"),
        (CHAT, HermesCalls(), '<tool_call>{"name": "calc", "arguments": {"expression": "1+2"}}</tool_call>'),
        (CHAT, TagCalls(), "I ask. <calc>1+2</calc>"),
    ],
)
def test_a_session_is_the_row_of_our_own_tool_loop(template: str | None, parser: CallParser, call: str) -> None:
    tokenizer, model = chatty(template)
    engine = ScriptedEngine(tokenizer, {0: [[call, "it is 3"]]})
    ours = ToolEnvironment(tools=[f"{AGENTS.with_name('agent_tools.py')}:calc"], parser=parser)
    theirs = AgentEnvironment(agent=f"{AGENTS}:tool_loop", parser=parser)
    (expected, _), (found, episodes) = (play(one, tokenizer, model, engine) for one in (ours, theirs))
    assert_same(found, expected, atol=0.0)
    assert int(found.action_mask.sum()) == len(call) + len("it is 3") + 2  # with the end tokens
    assert [turn.action for turn in episodes[0].turns] == [call, "it is 3"] and episodes[0].status == "ok"


@pytest.fixture(scope="module")
def policy(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return load_model(PolicyConfig(from_scratch=SHAPE), tokenizer)


@pytest.fixture(scope="module")
def acted(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Callable[..., tuple[Rollout, list[Episode]]]:
    """`play` by the native engine, without a chat template."""
    return lambda environment, **how: play(environment, tokenizer, policy, NativeEngine(), **how)


def test_when_agents_ask_changes_no_bit(acted: Any) -> None:
    agent = AgentEnvironment(agent=f"{AGENTS}:chat")
    played = [acted(agent, rows=[{"sleep": s}] * 3, group_size=3, length=6) for s in (0.0, 0.03)]
    assert_same(played[0][0], played[1][0], atol=0.0)
    assert {len(episode.turns) for episode in played[0][1]} == {3}


def parts(rollout: Rollout, tokenizer: PreTrainedTokenizerBase, row: int = 0) -> list[tuple[str, str, list[int]]]:
    """Each segment of a row: its prompt, the text that the policy wrote, and the turns that it did so in."""
    apart = Rows.of(rollout, torch.tensor([row])).unfolded()
    turns = rollout.turn_index[row][rollout.action_mask[row]].tolist()
    found = []
    for prompt, known, ids, written in zip(
        apart.prompt_ids, apart.prompt_mask, apart.completion_ids, apart.scored, strict=True
    ):
        own, turns = turns[: int(written.sum())], turns[int(written.sum()) :]
        text = tokenizer.decode(ids[written], skip_special_tokens=True)
        found.append((tokenizer.decode(prompt[known]), text, sorted(set(own))))
    return found


def test_a_segment_that_there_is_not_costs_its_session_alone(acted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, numbers = _Driver._answers, [99, -1, "1", 1.5, 0]

    def wrong(driver: _Driver, rows: Any) -> Any:
        """As an episode's process might say where the policy's text runs in it."""
        found = answers(driver, rows)
        told = [{**t.info, "segment": numbers[row.number]} if row.turns else t.info for row, t in found]
        return [(row, replace(t, info=info)) for (row, t), info in zip(found, told, strict=True)]

    monkeypatch.setattr(_Driver, "_answers", wrong)
    _, episodes = acted(AgentEnvironment(agent=f"{AGENTS}:chat"), rows=[{}] * len(numbers), length=6)
    wrong_ones = [episode.value is None and episode.detail.startswith("there is no segment") for episode in episodes]
    assert wrong_ones == [True, True, True, True, False] and episodes[4].status == "ok"


PROMPTS = {
    None: ["1+2=", "You are A.\n\ngo", "You are B.\n\ngo", "in short: 3", "another{0}<eos>|so?|"],
    CHAT: [
        "<user>1+2=<eos><assistant>",
        "<system>You are A.<eos><user>go<eos><assistant>",
        "<system>You are B.<eos><user>go<eos><assistant>",
        "<user>in short: 3<eos><assistant>",
        "<user>another<eos><assistant>{0}<eos><user>so?<eos><assistant>",
    ],
}
BRANCHING = AgentEnvironment(agent=f"{AGENTS}:branching", rewarded_by="agent")


@pytest.mark.parametrize("template", PROMPTS)
def test_each_conversation_of_an_agent_is_a_segment_of_its_sample(template: str | None) -> None:
    """Two sub-agents at once, one of which goes on, then the first conversation, a summary and an edited history."""
    tokenizer, model = chatty(template)
    limits = EpisodeSettings(max_turns=8, plain_turns=PlainTurns(observation="|{observation}|"))
    rollout, (episode,) = play(BRANCHING, tokenizer, model, NativeEngine(), limits=limits, length=3)
    assert (episode.status, episode.value) == ("ok", 7.0), episode.detail
    segments = parts(rollout, tokenizer)
    assert segments[0][0] == PROMPTS[template][0]
    assert sorted(prompt for prompt, *_ in segments) == sorted(p.format(episode.actions[0]) for p in PROMPTS[template])
    lengths = {prompt: len(turns) for prompt, _, turns in segments}
    assert [lengths[p.format(episode.actions[0])] for p in PROMPTS[template]] == [2, 2, 1, 1, 1]
    for number, (_, text, turns) in enumerate(segments):
        assert text == "".join(episode.actions[turn] for turn in turns)
        assert {episode.turns[turn].segment for turn in turns} == {number}
    if template is None:
        again, _ = play(BRANCHING, tokenizer, model, PlainEngine(), limits=limits, length=3)
        assert torch.equal(again.completion_ids, rollout.completion_ids)


def test_the_order_in_which_calls_at_once_arrive_changes_no_token(acted: Any) -> None:
    limits = EpisodeSettings(max_turns=8)
    rows = [{"sleep": 0.0}, {"sleep": 0.03}]
    (early, _), (late, _) = (acted(BRANCHING, rows=[row], group_size=4, limits=limits, length=3) for row in rows)
    assert_same(early, late, but=("turn_index",))
    assert set(early.segment_index.amax(dim=1).tolist()) == {4}


def test_calls_at_once_may_be_equal_and_draw_other_tokens(acted: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    agent = AgentEnvironment(agent=f"{AGENTS}:equal_calls")
    rollout, _ = acted(agent, length=6, limits=EpisodeSettings(max_turns=8))
    segments = parts(rollout, tokenizer)
    assert len({prompt for prompt, *_ in segments}) == 1 and len({text for _, text, _ in segments}) == 4


def test_a_prompt_without_a_token_costs_no_run(acted: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    agent = AgentEnvironment(agent=f"{AGENTS}:says_nothing")
    rollout, (episode,) = acted(agent, length=3)
    prompts = [prompt for prompt, *_ in parts(rollout, tokenizer)]
    assert episode.status == "ok" and sorted(prompts) == ["<pad>", "<pad>", "go on"]


def test_a_limit_on_tokens_counts_the_prompts_of_segments(acted: Any) -> None:
    limits = EpisodeSettings(max_turns=8, max_episode_tokens=25)
    rollout, (episode,) = acted(BRANCHING, limits=limits, length=3)
    assert (episode.finish_reason, episode.value) == ("tokens", 2.0)  # 20 of them, and no room for a prompt of 14
    assert int(rollout.lengths) <= 20


def test_an_agent_may_ask_for_fewer_tokens_and_a_limit_ends_its_session(acted: Any) -> None:
    rollout, (episode,) = acted(
        AgentEnvironment(agent=f"{AGENTS}:chat", rewarded_by="agent"),
        rows=[{"max_tokens": 2, "calls": 9}],
        limits=EpisodeSettings(max_turns=2),
    )
    assert [int((rollout.turn_index == turn).sum()) for turn in (0, 1)] == [2, 2]
    assert (episode.finish_reason, episode.value) == ("turns", 2.0)  # the agent counts its answers


@pytest.mark.parametrize(
    ("stop", "written", "heard"),
    [
        (["Observation:", "Calling tools:"], "I add. Observation:", "I add. "),
        ([" 9", "Obs"], "I add. Obs", "I add. "),  # the first in the text counts
        (" 9", "I add. Observation: 9", "I add. Observation:"),
        (["<unk>"], "I add. Observation: 9", "I add. Observation: 9"),  # a special token, drawn behind the 9
        (["nowhere"], "I add. Observation: 9, or 8", "I add. Observation: 9, or 8"),
    ],
)
def test_an_agent_may_name_texts_that_end_its_answers(stop: Any, written: str, heard: str) -> None:
    tokenizer, model = chatty(CHAT)
    engine = ScriptedEngine(tokenizer, {0: [["I add. Observation: 9\N{SNOWMAN}, or 8", "it is 3"]]})
    agent = AgentEnvironment(agent=f"{AGENTS}:stopping")
    rollout, (episode,) = play(agent, tokenizer, model, engine, rows=[{"stop": stop}])
    assert (episode.status, episode.actions) == ("ok", [written, "it is 3"])
    assert [turn.finish_reason for turn in episode.turns] == ["stop", "stop"]
    assert episode.turns[0].transition.observation == f"you say {heard!r}"
    first = rollout.completion_ids[0][rollout.turn_index[0] == 0]
    assert tokenizer.decode(first, skip_special_tokens=True) == written
    ends = {"<unk>": "<unk>", "nowhere": "<eos>"}.get(stop[0], written[-1])
    assert tokenizer.convert_ids_to_tokens(int(first[-1])) == ends


def test_what_ends_an_answer_changes_no_token_before(acted: Any) -> None:
    agent = AgentEnvironment(agent=f"{AGENTS}:stopping")
    _, (free,) = acted(agent, rows=[{"stop": []}], length=40)
    stop = free.actions[0][4:6]
    rollout, (cut,) = acted(agent, rows=[{"stop": [stop]}], length=40)
    assert cut.actions[0] == free.actions[0][: free.actions[0].find(stop) + 2]
    assert int((rollout.turn_index == 0).sum()) >= len(cut.actions[0])


def test_a_template_for_questions_does_not_go_with_an_agent(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    environment = AgentEnvironment(agent=f"{AGENTS}:chat")
    dialogue = Dialogue(template=PromptTemplate(user="Q: {question}"), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="AgentEnvironment writes its own prompts"):
        EpisodeSettings().check_context(dialogue, environment, 2048)
