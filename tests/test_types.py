"""Values that engines and users' own code take: what a request refuses."""

import dataclasses
import pickle

import pytest

from grpo_pl import types


def _keys(*sizes: int) -> list[list[types.SampleKey]]:
    return [
        [types.SampleKey(seed=0, split="train", step=0, attempt=0, prompt_id=p, sample=g) for g in range(size)]
        for p, size in enumerate(sizes)
    ]


def _request(prompt_ids: list[list[int]], keys: list[list[types.SampleKey]]) -> types.GenerateRequest:
    sampling = types.SamplingParams()
    return types.GenerateRequest(prompt_ids=prompt_ids, keys=keys, sampling=sampling, eos_token_ids=[2], pad_token_id=0)


@pytest.mark.parametrize(
    ("prompt_ids", "sizes", "message"),
    [
        ([], (), "0 prompts for 0 groups"),
        ([[1]], (1, 1), "1 prompts for 2"),
        ([[1], []], (1, 1), "a prompt has no tokens"),
        ([[1], [2]], (1, 2), r"one common size of at least 1, got sizes \[1, 2\]"),
        ([[1]], (0,), r"got sizes \[0\]"),
    ],
)
def test_a_request_that_no_engine_can_answer_is_refused(
    prompt_ids: list[list[int]], sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _request(prompt_ids, _keys(*sizes))


def test_a_request_is_a_value() -> None:
    """It stays as it was when its sources change, equals itself in another process, and parts are checked again."""
    prompt_ids, keys = [[1, 2], [3]], _keys(2, 2)
    request = _request(prompt_ids, keys)
    assert request.group_size == 2
    prompt_ids[1].clear()
    keys.clear()
    assert request.prompt_ids == ((1, 2), (3,)) and request == _request([[1, 2], [3]], _keys(2, 2))
    assert pickle.loads(pickle.dumps(request)) == request
    assert dataclasses.replace(request, prompt_ids=[[1]], keys=request.keys[:1]) == _request([[1]], _keys(2))
    with pytest.raises(ValueError, match="1 prompts for 2"):
        dataclasses.replace(request, prompt_ids=[[1]])
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.pad_token_id = 1  # type: ignore[misc]


@pytest.mark.parametrize(("parts", "sizes"), [(1, [5]), (2, [2, 3]), (3, [1, 2, 2]), (9, [1] * 5)])
def test_a_request_is_split_into_consecutive_prompts_none_of_them_lost(parts: int, sizes: list[int]) -> None:
    whole = _request([[p + 1] for p in range(5)], _keys(1, 1, 1, 1, 1))
    cut = whole.split(parts)
    assert [len(part.keys) for part in cut] == sizes
    assert tuple(ids for part in cut for ids in part.prompt_ids) == whole.prompt_ids
    assert tuple(key for part in cut for key in part.keys) == whole.keys
