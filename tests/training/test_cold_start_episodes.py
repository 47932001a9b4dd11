"""The cold start from worked episodes: played in the environment, and learnt as a rollout would have written them."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.data.tasks.generated import GeneratedPrompts
from grpo_pl.extras.agents import Environment, EnvironmentPool, Player, PolicyFault, PoolLimits, Transition
from grpo_pl.extras.agents.episodes import run_episodes
from grpo_pl.extras.agents.openai_agent import AgentEnvironment
from grpo_pl.extras.agents.tool_calls import TagCalls
from grpo_pl.policy.dialogue import Dialogue, PlainTurns
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.training import progress
from grpo_pl.training.cold_start import ColdStart, check_characters
from grpo_pl.training.cold_start_fit import make_start
from grpo_pl.training.sft import Example, demonstration_logprobs
from grpo_pl.training.stage import Stage
from grpo_pl.types import Problem, SampleKey, SamplingParams
from tests.training.test_cold_start import ONE, POLICY

SHORT = ColdStart(steps=2, batch_size=4, lr=1e-3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_PL_CACHE", str(tmp_path))


@dataclass(kw_only=True)
class Doors(Environment):
    """Behind each door named by the row a letter; whoever says it back goes on to the next, three times."""

    marks: str = "abc"

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        assert 0 <= seed < 2**32  # NumPy takes no other
        self.word, self.at = str(row["word"]), 0
        return self.word[0], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        if action == "!":
            raise PolicyFault("nobody shouts here")
        right = action == self.word[self.at]
        self.at += 1
        over = not right or self.at == len(self.word)
        return "" if over else self.word[self.at], float(right), over, False, {}


@dataclass(kw_only=True)
class Words(GeneratedPrompts):
    said: Sequence[str] | None = None
    """What demonstrations say; None repeats what they see."""

    def demonstrated_actions(self, prompt: Problem, rng: random.Random) -> Sequence[str] | Player:
        return _repeat if self.said is None else self.said

    def draw(self, rng: random.Random) -> Problem:
        word = "".join(rng.choice("abc") for _ in range(3))
        number = sum("abc".index(letter) * 3**i for i, letter in enumerate(word))
        return Problem(id=number, question="?", answer="", columns={"word": word})

    def how_to_get_more(self) -> str:
        return "ask for fewer."


def _repeat(turns: Sequence[Transition]) -> str:
    return str(turns[-1].observation)


def _examples(source: Words, template: PromptTemplate | None = None, **plain: str) -> list[Example]:
    stage = Stage(environment=Doors(), plain=PlainTurns(**plain))
    (batch,) = ColdStart(steps=1, batch_size=4, lr=1e-3).batches(
        template or PromptTemplate(), source, load_tokenizer(POLICY), stage
    )
    return batch


def _text(ids: Sequence[int]) -> str:
    return str(load_tokenizer(POLICY).decode(list(ids)))


def test_an_episode_is_one_sequence_of_which_only_the_actions_are_learnt() -> None:
    for prompt, completion, written, _ in _examples(Words(), observation="[{observation}]"):
        a, b, c = _text(completion).replace("<eos>", "").replace("[", "").replace("]", "")[::2]
        assert _text(prompt) == f"?\n{a}"
        assert _text(completion) == f"{a}<eos>[{b}]{b}<eos>[{c}]{c}<eos>"
        own = [token for token, mine in zip(completion, written, strict=True) if mine]
        assert _text(own) == f"{a}<eos>{b}<eos>{c}<eos>"


def test_an_episode_ends_with_the_action_that_ends_it_or_the_last_one_there_is() -> None:
    right, wrong = _examples(Words(said=["a"])), _examples(Words(said=["x", "y", "z"]))
    assert {_text(each.completion) for each in right} == {"a<eos>"}
    assert {_text(each.completion) for each in wrong} == {"x<eos>"}


def test_the_prefill_begins_every_action() -> None:
    (first, *_) = _examples(Words(said=["Go a", "Go b"]), PromptTemplate(prefill="Go "))
    assert _text(first.prompt).endswith("Go ")
    assert _text([t for t, own in zip(first.completion, first.written, strict=True) if own]).startswith("a<eos>")


def test_the_loss_is_the_mean_over_the_tokens_of_actions() -> None:
    tokenizer = load_tokenizer(POLICY)
    model = load_model(POLICY, tokenizer)
    batch = [*_examples(Words())[:2], *_examples(Words(said=["a"]))[:1]]  # of unequal length
    logprobs, mask = demonstration_logprobs(model, batch, pad_token_id=int(tokenizer.pad_token_id))
    loss = -(logprobs * mask).sum() / mask.sum()
    nll, count = 0.0, 0
    for prompt, completion, written, _ in batch:
        logprobs = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = [i for i, mine in enumerate(written) if mine]
        nll -= sum(logprobs[i, completion[i]].item() for i in own)
        count += len(own)
    assert loss.item() == pytest.approx(nll / count, rel=1e-5)


def test_a_policy_learns_to_answer_what_it_sees_in_the_very_tokens_of_its_episodes() -> None:
    template, tokenizer = PromptTemplate(user="\n{question}\n"), load_tokenizer(POLICY)
    stage = Stage(environment=Doors(isolation="thread"))
    cold = ColdStart(steps=150, batch_size=16, lr=2e-2)
    folder = make_start(cold, POLICY, template, Words(), stage, trainer=ONE)
    shown = dict(zip((p.id for p in Words().prompts(-1, count=4)), _examples(Words(), template), strict=True))
    problems = Words().prompts(-1, count=4)
    with EnvironmentPool(stage.environment) as pool:
        rollout, episodes = run_episodes(
            NativeEngine(),
            load_model(POLICY, tokenizer, str(folder)),
            dialogue=Dialogue(template=template, tokenizer=tokenizer),
            pool=pool,
            problems=problems,
            keys=[[SampleKey(seed=0, split="val", step=0, attempt=0, prompt_id=p.id, sample=0)] for p in problems],
            sampling=SamplingParams(max_completion_length=2, temperature=0.0),
            limits=EpisodeSettings(max_turns=9),
        )
    assert [episode.value for episode in episodes] == [3.0] * 4
    for row, problem in enumerate(problems):
        example = shown[problem.id]
        assert rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist() == example.prompt
        assert rollout.completion_ids[row][rollout.completion_mask[row]].tolist() == example.completion
        assert rollout.action_mask[row][rollout.completion_mask[row]].tolist() == example.written


def test_environment_and_plain_form_name_the_cache() -> None:
    def folder(stage: Stage | None) -> Path:
        return SHORT.folder(POLICY, PromptTemplate(), Words(), stage)

    stages = [
        None,
        Stage(environment=Doors()),
        Stage(environment=Doors(marks="x")),
        Stage(environment=Doors(blame="policy")),
        Stage(environment=Doors(), plain=PlainTurns(observation="{observation}")),
    ]
    assert len({folder(stage) for stage in stages}) == len(stages)
    assert folder(stages[1]) == folder(Stage(environment=Doors()))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([], "has no action"),
        (["!"], "breaks a rule of the environment: nobody shouts here"),
        (["ß"], r"the vocabulary lacks 'ß' \(U\+00DF\), in 8 of 8 demonstrations"),
    ],
)
def test_demonstrations_that_cannot_be_learnt_are_one_clear_line(said: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_start(SHORT, POLICY, PromptTemplate(), Words(said=said), Stage(environment=Doors()), trainer=ONE)


def test_what_the_policy_would_read_has_to_be_in_the_vocabulary_too() -> None:
    policy = PolicyConfig(from_scratch=POLICY.from_scratch, characters="?\nab")
    with pytest.raises(ValueError, match=r"lacks 'c'"):
        make_start(SHORT, policy, PromptTemplate(), Words(said=["a", "b"]), Stage(environment=Doors()), trainer=ONE)


def test_a_source_without_episodes_is_one_clear_line() -> None:
    class Silent(Words):
        def demonstrated_actions(self, prompt: Problem, rng: random.Random) -> None:
            return None

    with pytest.raises(ValueError, match=r"Silent has no demonstrations: .* override demonstrated_actions\(\)"):
        make_start(SHORT, POLICY, PromptTemplate(), Silent(), Stage(environment=Doors()), trainer=ONE)


def test_a_file_of_exchanges_is_learnt_as_episodes(tmp_path: Path) -> None:
    said = ["user", "assistant", "tool", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(said, "?abc", strict=True)]
    file = tmp_path / "shown.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    cold, tokenizer = ColdStart(steps=1, batch_size=1, lr=1e-3, demonstrations=str(file)), load_tokenizer(POLICY)
    stage = Stage(environment=Doors(), plain=PlainTurns(observation="[{observation}]"))
    ((found,),) = cold.batches(PromptTemplate(), Words(), tokenizer, stage)
    assert (_text(found.prompt), _text(found.completion)) == ("?", "a<eos>[b]c<eos>")
    with pytest.raises(ValueError, match=r"shown\.jsonl holds episodes of several turns: set model\.environment"):
        make_start(cold, POLICY, PromptTemplate(), Words(), trainer=ONE)


def test_the_demonstrations_of_an_agent_have_the_limits_of_the_run() -> None:
    agents = Path(__file__).parents[1] / "plugins" / "user_agents.py"
    agent = AgentEnvironment(agent=f"{agents}:wayward", rewarded_by="agent")
    stage = Stage(environment=agent, limits=PoolLimits(step_timeout_s=0.5))
    problem = Problem(id=1, question="?", answer="", columns={"deed": "hang"})
    with stage.open(), pytest.raises(ValueError, match=r"timeout: step took longer than 0\.5 s"):
        stage.demonstrations([(problem, ["a", "b"], 0)])


def test_the_demonstrations_of_an_agent_are_what_it_asked_and_heard() -> None:
    agents = Path(__file__).parents[1] / "plugins" / "user_agents.py"
    stage = Stage(environment=AgentEnvironment(agent=f"{agents}:tool_loop", parser=TagCalls()))
    problems = [Problem(id=n, question=f"{n}+2=", answer="") for n in (1, 5)]
    with stage.open():
        shown = stage.demonstrations([(p, [f"<calc>{p.id}+2</calc>", "so"], 0) for p in problems])
        assert [(one.question, one.completion, one.further) for one in shown] == [
            (
                ({"role": "user", "content": f"{n}+2="},),
                f"<calc>{n}+2</calc>",
                ((f"<result>got {n}+2</result>", "so"),),
            )
            for n in (1, 5)
        ]
        assert shown[0].tools[0]["function"]["name"] == "calc" and "<calc>" in shown[0].told_tools
        tags = ("<calc>", "</calc>", "<result>", "</result>")
        assert check_characters(shown, frozenset("0123456789+= gots"), tags) == shown  # their texts, not their roles
        with pytest.raises(ValueError, match="demonstration of prompt 1 cannot be played: it has no action"):
            stage.demonstrations([(problems[0], [], 0)])
    several = Stage(environment=AgentEnvironment(agent=f"{agents}:branching"))
    with (
        several.open(),
        pytest.raises(ValueError, match="the agent begins a second conversation"),
    ):
        several.demonstrations([(problems[0], ["a", "b", "c"], 0)])


def test_sessions_that_are_played_for_long_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agents = Path(__file__).parents[1] / "plugins" / "user_agents.py"
    stage = Stage(environment=AgentEnvironment(agent=f"{agents}:chat"))
    played: list[Any] = [(Problem(id=n, question="?", answer="", columns={"calls": 2}), ["a", "b"], 0) for n in (1, 2)]
    with stage.open():
        stage.demonstrations(played)
        assert capsys.readouterr().err == ""  # it took no ten seconds
        monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0.0)
        stage.demonstrations(played)
    lines = [line for line in capsys.readouterr().err.splitlines() if "turns played" in line]
    assert [int(line.rpartition(" ")[2]) for line in lines] == [6, 8, 8]  # 4 turns before, then two by two
