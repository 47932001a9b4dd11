"""Episodes of many turns: rows token for token, limits, and what environments may do wrong."""

import gc
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).parents[2] / "plugins"))

from user_environments import Countdown, Fated

from grpo_pl.extras.agents import Environment, EnvironmentPool, PoolLimits
from grpo_pl.extras.agents.episode_rows import Episode
from grpo_pl.extras.agents.episodes import EpisodeRequest, run_episodes
from grpo_pl.extras.engines.child.player import Player
from grpo_pl.extras.engines.copy_engine import ModelSpec
from grpo_pl.extras.engines.native_child import NativeChildEngine
from grpo_pl.extras.kernels.kernel_slots import KernelSlots
from grpo_pl.functional.sampling import small_seed
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.loading import PolicyConfig, load_model
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.policy.weights import checkpoint_weights
from grpo_pl.rollout.decoding import join_rollouts
from grpo_pl.rollout.engine import RolloutEngine, RolloutInterrupted
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.native.slots import TurnSlots
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import NO_TURN, GenerateRequest, Problem, Rollout, SampleKey, SamplingParams
from tests.process_list import started_processes
from tests.rollout.drawn import assert_same, generate, make_keys, rows_of

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
ENDS = tuple(range(20, 45))  # a quarter of the tokens end an action, so that actions have many lengths
SAMPLING = SamplingParams(max_completion_length=7, stop_token_ids=ENDS)
TURNS = EpisodeSettings(max_turns=4)


def made(tokenizer: PreTrainedTokenizerBase, family: str = "qwen2", **changes: Any) -> PreTrainedModel:
    return load_model(PolicyConfig(from_scratch={"model_type": family, **SHAPE, **changes}), tokenizer)


@pytest.fixture(scope="module")
def policy(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return made(tokenizer)


@pytest.fixture(scope="module")
def dialogue(tokenizer: PreTrainedTokenizerBase) -> Dialogue:
    return Dialogue(template=PromptTemplate(user="{question}\n", prefill=">"), tokenizer=tokenizer)


@dataclass(frozen=True)
class Play:
    """``run_episodes`` with a small request; every argument can be another."""

    policy: PreTrainedModel
    dialogue: Dialogue

    def __call__(
        self,
        environment: Environment | None = None,
        *,
        engine: RolloutEngine | None = None,
        rows: Sequence[Mapping[str, Any]] = ({}, {}, {}),
        group_size: int = 2,
        sampling: SamplingParams = SAMPLING,
        limits: EpisodeSettings = TURNS,
        pool_limits: PoolLimits | None = None,
        **others: Any,
    ) -> tuple[Rollout, list[Episode]]:
        problems = [
            Problem(id=100 + p, question=f"Go {p}{p}"[: 3 + p], answer="", columns=row) for p, row in enumerate(rows)
        ]
        with EnvironmentPool(environment or Fated(isolation="thread"), pool_limits) as pool:
            return run_episodes(
                engine or NativeEngine(),
                others.pop("model", self.policy),
                dialogue=others.pop("dialogue", self.dialogue),
                pool=pool,
                problems=others.pop("problems", problems),
                keys=make_keys(len(problems), group_size, seed=1, step=2),
                sampling=sampling,
                limits=limits,
                **others,
            )


@pytest.fixture(scope="module")
def play(policy: PreTrainedModel, dialogue: Dialogue) -> Play:
    return Play(policy, dialogue)


def chatty(family: str) -> PreTrainedTokenizerBase:
    """Characters, with the chat template of a family that comes with TRL."""
    tokenizer = character_tokenizer()
    templates = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / f"{family}.jinja").read_text()
    return tokenizer


def actions(rollout: Rollout, row: int) -> list[list[int]]:
    """The tokens of each turn."""
    turns, tokens = rollout.turn_index[row], rollout.completion_ids[row]
    return [tokens[turns == turn].tolist() for turn in range(int(turns.max()) + 1)]


def shown(episode: Episode) -> list[Any]:
    return [turn.transition.observation for turn in episode.turns]


def rewards(episode: Episode) -> list[float]:
    return [turn.transition.reward for turn in episode.turns]


def same(left: Rollout, right: Rollout) -> bool:
    return torch.equal(left.completion_ids, right.completion_ids) and torch.equal(left.turn_index, right.turn_index)


def test_a_row_is_prompt_action_observation_action(play: Play, dialogue: Dialogue) -> None:
    rollout, episodes = play()
    tokenizer = dialogue.tokenizer
    assert len(episodes) == 6 and rollout.group_size == 2
    for i, episode in enumerate(episodes):
        prompt = rollout.prompt_ids[i][rollout.prompt_mask[i]].tolist()
        assert prompt == dialogue.prompt_ids(f"Go {i // 2}{i // 2}"[: 3 + i // 2], episode.start.observation)
        told = [
            dialogue.observation_ids(shown, tokens[-1])
            for shown, tokens in zip(shown(episode), actions(rollout, i), strict=True)
        ]
        expected = [
            token for tokens, heard in zip(actions(rollout, i), told, strict=True) for token in [*tokens, *heard]
        ]
        row = rollout.completion_ids[i][rollout.completion_mask[i]].tolist()
        assert row == expected[: -len(told[-1])]  # what the last action led to is in no row
        assert episode.actions == [">" + tokenizer.decode(t, skip_special_tokens=True) for t in actions(rollout, i)]
        assert shown(episode) == [f"turn {k + 1}: {len(text)}" for k, text in enumerate(episode.actions)]
        ends = [tokens[-1] in (*ENDS, tokenizer.eos_token_id) for tokens in actions(rollout, i)]
        assert [turn.finish_reason for turn in episode.turns] == ["stop" if end else "length" for end in ends]
        assert (episode.finish_reason, episode.status, rewards(episode), episode.value) == (
            "turns",
            "ok",
            [0.1] * 4,
            0.4,
        )
        assert episode.states[0] == "('left', 3)" and episode.states[2].startswith("(2, '>")
    assert len({len(tokens) for i in range(6) for tokens in actions(rollout, i)}) > 2
    assert rollout.finish_reasons == ["turns"] * 6
    assert torch.equal(rollout.action_mask, rollout.turn_index != NO_TURN)
    assert not rollout.sampling_logprobs[~rollout.action_mask].any()
    assert (rollout.sampling_logprobs[rollout.action_mask] < 0).all()


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_kept_keys_and_values_draw_what_computing_them_anew_draws(
    family: str, play: Play, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = made(tokenizer, family)
    (kept, episodes), (anew, others) = play(model=model), play(model=model, engine=PlainEngine())
    assert same(kept, anew) and episodes == others
    torch.testing.assert_close(kept.sampling_logprobs, anew.sampling_logprobs, rtol=1e-4, atol=1e-4)


def test_turns_are_kept_up_to_the_window_of_attention(play: Play, tokenizer: PreTrainedTokenizerBase) -> None:
    model = made(tokenizer, use_sliding_window=True, sliding_window=60, max_window_layers=0)
    assert model.model.layers[0].self_attn.sliding_window == 60
    engine = NativeEngine()
    (kept, episodes), (anew, others) = play(model=model, engine=engine), play(model=model, engine=PlainEngine())
    assert same(kept, anew) and episodes == others
    assert (kept.prompt_mask.sum(dim=1) + kept.lengths).max() > 60
    assert "own forward pass" in engine.describe() or "the decode kernel" in engine.describe()


def test_a_turn_is_drawn_again_from_its_context_alone(play: Play, policy: PreTrainedModel) -> None:
    rollout, _ = play()
    contexts, keys, drawn = [], [], []
    for row in range(6):
        prompt, name = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist(), 100 + row // 2
        for turn, tokens in enumerate(actions(rollout, row)):
            begin = int((rollout.turn_index[row] == turn).nonzero()[0])
            contexts.append(prompt + rollout.completion_ids[row][:begin].tolist())
            keys.append(SampleKey(seed=1, split="train", step=2, attempt=0, prompt_id=name, sample=row % 2, turn=turn))
            drawn.append(tokens)

    def again(keys: list[SampleKey]) -> list[list[int]]:
        ends = [*ENDS, play.dialogue.tokenizer.eos_token_id]
        return rows_of(generate(PlainEngine(), policy, contexts, [[key] for key in keys], length=7, eos=ends))

    assert again(keys) == drawn
    assert again([replace(key, turn=0) for key in keys]) != drawn  # every turn has random numbers of its own


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_how_fast_environments_answer_changes_no_bit(isolation: Any, play: Play) -> None:
    rollout, episodes = play()
    late, others = play(Fated(isolation=isolation, slow=0.05))
    assert same(late, rollout) and episodes == others
    assert torch.equal(late.sampling_logprobs, rollout.sampling_logprobs)


def test_fewer_episodes_at_once_are_the_same_episodes(play: Play) -> None:
    rollout, episodes = play()
    for engine in (NativeEngine(max_batch_rows=4), PlainEngine(max_batch_rows=1)):
        parts, others = play(engine=engine)
        assert same(parts, rollout) and episodes == others


def test_a_single_turn_without_observation_is_a_completion(play: Play, policy: PreTrainedModel) -> None:
    class Silent(Fated):
        def reset(self, *, seed: int, row: Mapping[str, Any]) -> Any:
            super().reset(seed=seed, row=row)
            return "", {}

    rollout, _ = play(Silent(isolation="thread"), limits=EpisodeSettings(max_turns=1))
    prompts = [play.dialogue.template.encode(text, play.dialogue.tokenizer) for text in ("Go ", "Go 1", "Go 22")]
    end, pad = play.dialogue.tokenizer.eos_token_id, int(play.dialogue.tokenizer.pad_token_id)
    keys = make_keys(3, 2, seed=1, step=2)
    plain = generate(NativeEngine(), policy, prompts, keys, length=7, eos=[*ENDS, end], pad=pad)
    assert_same(rollout, plain, but=("finish_reasons",))


def test_greedy_episodes_of_a_group_are_equal(play: Play) -> None:
    rollout, episodes = play(sampling=replace(SAMPLING, temperature=0.0))
    anew, _ = play(sampling=replace(SAMPLING, temperature=0.0), engine=PlainEngine())
    assert same(rollout, anew)
    assert episodes[0] == episodes[1] and torch.equal(rollout.completion_ids[0], rollout.completion_ids[1])


def test_a_stop_string_ends_an_action(play: Play) -> None:
    stop = SamplingParams(max_completion_length=20, stop=("Q", "7", ">b"))
    (kept, episodes), (anew, _) = play(sampling=stop), play(sampling=stop, engine=PlainEngine())
    assert same(kept, anew)
    found = 0
    for turn in (turn for episode in episodes for turn in episode.turns):
        at = [turn.action.find(text) + len(text) for text in stop.stop if text in turn.action]
        assert not at or min(at) == len(turn.action)  # the first one is the end
        found += bool(at)
    assert found > 3


def test_all_episodes_of_a_group_begin_alike(play: Play) -> None:
    _, episodes = play(
        Countdown(isolation="thread"), rows=[{"start": 9}, {"start": 4}], limits=EpisodeSettings(max_turns=1)
    )
    seeds = [small_seed(1, "train", 2, 0, prompt) for prompt in (100, 101)]
    shown = [f"9 (seed {seeds[0]})", f"4 (seed {seeds[1]})"]
    assert [e.start.observation for e in episodes] == [shown[0], shown[0], shown[1], shown[1]]


FATES = {
    "hang": "timeout",
    "raise": "raised",
    "die": "killed",
    "megabyte": "too_long",
    "number": "malformed",
    "nan": "malformed",
    "list state": "malformed",
    "no reset": "raised",
    "fault": "policy",
    "-9": "ok",
}


def test_two_hundred_episodes_and_everything_that_goes_wrong(play: Play) -> None:
    """What goes wrong costs its own episode; nothing is left running."""
    before = set(started_processes())
    rows = [{"fate": fate, "at": 1 + (i and fate != "hang")} for i in range(2) for fate in FATES]
    rollout, episodes = play(
        Fated(start=9),
        rows=rows,
        group_size=10,
        limits=EpisodeSettings(max_turns=3),
        pool_limits=PoolLimits(step_timeout_s=2.5, max_observation_chars=10_000),
    )
    assert len(episodes) == 200 == len(rollout.completion_ids)
    for i, episode in enumerate(episodes):
        row = rows[i // 10]
        fate, turns = row["fate"], 0 if row["fate"] == "no reset" else row["at"]
        assert (episode.status, len(episode.turns)) == (FATES[fate], turns), (fate, episode.detail)
        assert episode.finish_reason == "environment" and bool(episode.detail) == (FATES[fate] != "ok")
        earned = {"-9": 0.9, "fault": 0.0}.get(fate)
        assert episode.value == (None if earned is None else pytest.approx(earned + 0.1 * (turns - 1)))
        acted = rollout.action_mask[i]
        assert len(actions(rollout, i)) == turns
        assert bool(acted[int(rollout.lengths[i]) - 1]) == (turns > 0)
    empty = [i for i in range(200) if not episodes[i].turns]
    assert rollout.lengths[empty].tolist() == [1] * 20 and rollout.action_lengths[empty].tolist() == [0] * 20
    assert rollout.prompt_mask[empty].any(dim=1).all()
    assert set(started_processes()) <= before


def test_what_is_due_at_a_limit_belongs_to_the_last_turn(play: Play) -> None:
    _, episodes = play(Fated(isolation="thread", due=0.2))
    assert {tuple(rewards(episode)) for episode in episodes} == {(0.1, 0.1, 0.1, 0.3)}
    assert episodes[0].value == 0.6 and episodes[0].turns[-1].transition.truncated


def test_the_tokens_of_an_episode_are_limited(play: Play) -> None:
    whole, uncut = play()
    reasons, cut = set[str](), 0
    for most in range(36, 60, 3):
        rollout, episodes = play(limits=EpisodeSettings(max_turns=4, max_episode_tokens=most))
        for i, episode in enumerate(episodes):
            length = int(rollout.lengths[i])
            assert length <= most and bool(rollout.action_mask[i, length - 1])
            assert rollout.completion_ids[i, :length].tolist() == whole.completion_ids[i, :length].tolist()
            last, as_it_was = episode.turns[-1], uncut[i].turns[len(episode.turns) - 1]
            if last.action != as_it_was.action:  # cut, and played so
                assert (last.finish_reason, length) == ("length", most)
                assert last.transition.observation.endswith(f": {len(last.action)}")
                cut += 1
            reasons.add(episode.finish_reason)
            assert episode.finish_reason == ("turns" if len(episode.turns) == 4 else "tokens")
    assert reasons == {"turns", "tokens"} and cut


class Strict(NativeEngine):
    """Refuses what goes beyond its own limit, as servers of models do."""

    max_tokens = 70

    def generate(self, model: PreTrainedModel, request: GenerateRequest, **told: Any) -> Rollout:
        assert max(map(len, request.prompt_ids)) + request.sampling.max_completion_length <= self.max_tokens
        return super().generate(model, request, **told)

    def continuing(self, model: PreTrainedModel, *, rows: int) -> RolloutEngine:
        return self


def test_no_row_is_asked_for_more_than_the_limit_of_the_engine(play: Play) -> None:
    rollout, _ = play(engine=Strict(), rows=[{}, {"shown": "x" * 30}], limits=EpisodeSettings(max_turns=9))
    assert set(rollout.finish_reasons) == {"tokens"}
    assert 60 < int((rollout.prompt_mask.sum(dim=1) + rollout.lengths).max()) <= 70


class Apart(NativeEngine):
    """Has them played in parts by a worker, beside environments of its own."""

    def play(self, model: PreTrainedModel, request: EpisodeRequest, **told: Any) -> tuple[Rollout, list[Episode]]:
        settings = NativeChildEngine().settings(ModelSpec.of(model))
        player = Player(NativeChildEngine.worker, settings)
        player.worker.load(checkpoint_weights(model))
        parts = pickle.loads(pickle.dumps(request)).split(2)
        drawn = [player.draw(part, progress=lambda *_: None, should_stop=lambda: False) for part in parts]
        rollout = join_rollouts([rollout for rollout, _ in drawn], request.pad_token_id)
        return rollout, [episode for _, episodes in drawn for episode in episodes]


def test_a_worker_plays_the_same_episodes_beside_environments_of_its_own(play: Play) -> None:
    here, apart = play(), play(engine=Apart())
    assert same(here[0], apart[0])
    assert torch.allclose(here[0].sampling_logprobs, apart[0].sampling_logprobs, atol=1e-5)
    assert here[1] == apart[1]


def test_a_prompt_that_is_too_long_costs_its_own_episodes(play: Play) -> None:
    problems = [
        Problem(id=100 + p, question=question, answer="") for p, question in enumerate(["Go ", "x" * 400, "Go 22"])
    ]
    rollout, episodes = play(problems=problems)
    assert [episode.finish_reason for episode in episodes] == ["turns"] * 2 + ["tokens"] * 2 + ["turns"] * 2
    assert [episode.value is None for episode in episodes] == [False, False, True, True, False, False]
    assert rollout.action_lengths.tolist()[2:4] == [0, 0]
    _, failing = play(Fated(isolation="thread"), problems=[replace(p, columns={"fate": "no reset"}) for p in problems])
    assert {episode.status for episode in failing} == {"raised"}


FAMILIES = {
    "qwen2": {**SHAPE, "max_position_embeddings": 80},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 80, "initializer_range": 0.3},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_episodes_end_where_the_context_does(family: str, play: Play, tokenizer: PreTrainedTokenizerBase) -> None:
    shape = {"model_type": family, **FAMILIES[family]}
    small = load_model(PolicyConfig(from_scratch=shape), tokenizer)
    uneven = [{"shown": "x" * length} for length in range(7)]
    rollout, episodes = play(model=small, rows=uneven, limits=EpisodeSettings(max_turns=12))
    assert set(rollout.finish_reasons) == {"tokens"}
    total = rollout.prompt_mask.sum(dim=1) + rollout.lengths
    assert total.max() <= 80 and total.min() > 50
    anew, _ = play(model=small, rows=uneven, limits=EpisodeSettings(max_turns=12), engine=PlainEngine())
    assert same(rollout, anew)
    rollout, episodes = play(model=small, rows=[{}, {"shown": "x" * 200}], limits=EpisodeSettings(max_turns=12))
    assert [episode.finish_reason for episode in episodes] == ["tokens"] * 4
    assert [episode.value is None for episode in episodes] == [False, False, True, True]
    assert rollout.action_lengths.tolist()[2:] == [0, 0]
    assert (rollout.prompt_mask.sum(dim=1) + rollout.lengths).max() <= 80  # so that they can be scored


def test_messages_that_cannot_begin_an_episode_cost_that_episode(play: Play) -> None:
    chat = [{"role": "assistant", "content": "Me first."}]
    _, episodes = play(rows=[{}, {"shown": chat}])
    assert [episode.status for episode in episodes] == ["ok", "ok", "malformed", "malformed"]
    assert "must end with a message of the user, got 'assistant'" in episodes[2].detail and episodes[2].value is None


def test_a_template_that_refuses_what_an_environment_shows_costs_that_episode(policy: PreTrainedModel) -> None:
    tokenizer = chatty("gemma3")
    model = made(tokenizer)
    talk = Dialogue(template=PromptTemplate(), tokenizer=tokenizer)
    twice = [{"role": "user", "content": "This is asked, too."}]  # roles must alternate there
    _, episodes = Play(model, talk)(rows=[{}, {"shown": twice}], limits=EpisodeSettings(max_turns=1))
    assert [episode.status for episode in episodes] == ["ok", "ok", "malformed", "malformed"]
    assert "roles must alternate" in episodes[2].detail


def test_turns_go_through_the_chat_template(policy: PreTrainedModel) -> None:
    tokenizer = chatty("qwen2_5")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", tokenizer.eos_token)
    model = made(tokenizer)
    talk = Dialogue(template=PromptTemplate(), tokenizer=tokenizer)
    sampling = SamplingParams(max_completion_length=5)
    rollout, _ = Play(model, talk)(sampling=sampling, limits=EpisodeSettings(max_turns=2), rows=[{}], group_size=3)
    for row, mask in zip(rollout.completion_ids, rollout.completion_mask, strict=True):
        text = tokenizer.decode(row[mask])
        assert text.count(tokenizer.eos_token + "\n<|im_start|>user\nturn 1: ") == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"limits": EpisodeSettings(max_turns=80)}, r"^max_turns=80 \(at least 317 tokens\) exceeds .* of 256"),
        (
            {"limits": EpisodeSettings(max_episode_tokens=256)},
            r"max_episode_tokens is 256, .* context of 256 must hold",
        ),
        ({"limits": EpisodeSettings(max_turns=9, max_episode_tokens=20)}, r"max_episode_tokens=20 can never hold that"),
        ({"environment": Countdown(isolation="thread"), "rows": []}, "0 prompts for 0 groups"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_reset(changes: Any, told: str, play: Play) -> None:
    with pytest.raises(ValueError, match=told):
        play(**changes)


def test_a_template_that_rewrites_earlier_turns_is_refused_before_the_first_reset(policy: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="writes earlier turns differently"):
        Play(policy, Dialogue(template=PromptTemplate(), tokenizer=chatty("qwen3")))()


@pytest.mark.parametrize("field", ["max_turns", "max_episode_tokens"])
def test_limits_must_be_limits(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .* got -1"):
        EpisodeSettings(**{field: -1})


class Interruptions:
    """Asks to stop from the n-th question on."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("after", [0, 3, 12])
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_step_that_is_told_to_stop_leaves_nothing_open(after: int, isolation: Any, play: Play) -> None:
    before = set(started_processes())
    with EnvironmentPool(Fated(isolation=isolation, slow=0.02)) as pool:
        problems = [Problem(id=1, question="Go", answer="")]
        request: dict[str, Any] = {
            "dialogue": play.dialogue,
            "pool": pool,
            "problems": problems,
            "keys": make_keys(1, 3),
            "sampling": SAMPLING,
            "limits": TURNS,
        }
        with pytest.raises(RolloutInterrupted):
            run_episodes(NativeEngine(), play.policy, **request, should_stop=Interruptions(after))
        assert set(started_processes()) <= before
        run_episodes(NativeEngine(), play.policy, **request)  # the pool may be used again


def test_progress_counts_tokens_of_actions_and_episodes_that_have_ended(play: Play) -> None:
    told: list[tuple[int, int]] = []
    rollout, _ = play(progress=lambda tokens, ended: told.append((tokens, ended)))
    assert told == sorted(told) and told[-1] == (int(rollout.action_lengths.sum()), 6)


def test_nothing_is_kept_after_a_step(play: Play) -> None:
    play()
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, TurnSlots | KernelSlots)]


def test_each_turn_has_a_thinking_budget(play: Play, tokenizer: PreTrainedTokenizerBase) -> None:
    sampling = replace(SAMPLING, thinking_budget=(2, 4))
    kept, anew = (play(engine=engine, sampling=sampling) for engine in (NativeEngine(), PlainEngine()))
    assert same(kept[0], anew[0])
    rollout, episodes = kept
    (end,) = tokenizer("</think>", add_special_tokens=False).input_ids
    fed = (rollout.completion_ids == end) & ~rollout.action_mask & rollout.completion_mask
    assert fed.any()
    for row, episode in enumerate(episodes):
        for turn, written in enumerate(actions(rollout, row)):
            thought = ">" + tokenizer.decode(written, skip_special_tokens=True)
            assert episode.actions[turn].replace("</think>", "") == thought.replace("</think>", "")
        closed = sum("</think>" in action for action in episode.actions)
        assert closed >= int(fed[row].sum())
