"""Taking groups out of samples and joining samples: rows keep what belongs to them."""

import torch

from grpo_pl.rollout.groups import join_samples, select_groups
from grpo_pl.rollout.sampler import Samples
from grpo_pl.types import NO_TURN, NO_VERSION, Problem, Rollout

PAD = 9
ANSWER = Rollout(  # one prompt of a single turn
    group_size=1,
    prompt_ids=torch.tensor([[1, 2, 3]]),
    prompt_mask=torch.ones(1, 3, dtype=torch.bool),
    completion_ids=torch.tensor([[4, 5]]),
    completion_mask=torch.tensor([[True, True]]),
    sampling_logprobs=torch.tensor([[-0.5, -0.25]]),
    finish_reasons=["stop"],
)
EPISODE = Rollout(  # two turns with an observation of one token between, beside an episode of one turn
    group_size=1,
    prompt_ids=torch.tensor([[1, 2], [PAD, 1]]),
    prompt_mask=torch.tensor([[True, True], [False, True]]),
    completion_ids=torch.tensor([[4, 8, 5, 6], [7, PAD, PAD, PAD]]),
    completion_mask=torch.tensor([[True] * 4, [True, False, False, False]]),
    sampling_logprobs=torch.tensor([[-1.0, 0.0, -2.0, -3.0], [-4.0, 0.0, 0.0, 0.0]]),
    finish_reasons=["turns", "environment"],
    action_mask=torch.tensor([[True, False, True, True], [True, False, False, False]]),
    turn_index=torch.tensor([[0, NO_TURN, 1, 1], [0, NO_TURN, NO_TURN, NO_TURN]]),
    policy_version=torch.tensor([[5, NO_VERSION, 6, 6], [6, NO_VERSION, NO_VERSION, NO_VERSION]]),
)


def _samples(rollout: Rollout, first: int) -> Samples:
    ids = range(first, first + len(rollout.finish_reasons))
    return Samples(
        prompts=[Problem(id=i, question=str(i), answer="") for i in ids],
        prompt_texts=[f"prompt {i}" for i in ids],
        rollout=rollout,
        completions=[f"completion {i}" for i in ids],
        step=0,
    )


def test_a_single_turn_is_all_action() -> None:
    padded = _join().rollout
    assert torch.equal(ANSWER.action_mask, ANSWER.completion_mask) and ANSWER.turn_index.tolist() == [[0, 0]]
    assert padded.action_lengths.tolist() == [2, 3, 1] and padded.lengths.tolist() == [2, 4, 1]


def _join() -> Samples:
    return join_samples([_samples(ANSWER, 0), _samples(EPISODE, 1)], PAD)


def test_joined_rows_keep_their_turns_and_are_padded_with_none() -> None:
    joined = _join().rollout
    assert joined.prompt_ids.tolist() == [[1, 2, 3], [PAD, 1, 2], [PAD, PAD, 1]]
    assert joined.completion_ids.tolist() == [[4, 5, PAD, PAD], [4, 8, 5, 6], [7, PAD, PAD, PAD]]
    assert joined.action_mask.tolist() == [
        [True, True, False, False],
        [True, False, True, True],
        [True, False, False, False],
    ]
    none = NO_TURN
    nil = NO_VERSION
    assert joined.policy_version.tolist() == [[0, 0, nil, nil], [5, nil, 6, 6], [6, nil, nil, nil]]
    assert joined.turn_index.tolist() == [[0, 0, none, none], [0, none, 1, 1], [0, none, none, none]]


def test_selected_groups_keep_theirs() -> None:
    chosen = select_groups(_join(), [2, 1])
    assert [prompt.id for prompt in chosen.prompts] == [2, 1]
    assert chosen.rollout.finish_reasons == ["environment", "turns"]
    assert chosen.rollout.policy_version[1].tolist() == [5, NO_VERSION, 6, 6]
    assert chosen.rollout.turn_index[1].tolist() == [0, NO_TURN, 1, 1]
    assert chosen.rollout.action_lengths.tolist() == [1, 3]
