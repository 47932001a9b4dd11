"""Large answers: written piece by piece, and the same text as at once."""

import asyncio
import json
from typing import Any

import pytest

from serve.json_response import Encoded, encoded, large_json_response, to_json

ROW = {"token": 'é\ud800"\\', "logprob": -0.5, "top": [[1, -1e-9], [2, None]], "none": [], "nothing": {}}


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        "x",
        [ROW],
        list(range(64)),
        list(range(65)),
        list(range(1000)),
        [ROW] * 200,
        {"a": [ROW] * 64, "b": [ROW] * 65, 'c"': {"d": list(range(129)), "e": True}},
        [list(range(100)), [], list(range(3)), {"x": [list(range(70)) for _ in range(70)]}],
        [[[[ROW] * 65]]],
    ],
    ids=lambda value: to_json(value)[:20],
)
def test_an_answer_in_pieces_is_the_one_at_once(value: Any) -> None:
    response = asyncio.run(large_json_response(lambda: value))
    assert response.body.decode() == to_json(value)
    assert json.loads(response.body) == value
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")


def test_what_has_no_json_is_raised() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        asyncio.run(large_json_response(lambda: [*range(100), float("nan")]))


def test_what_is_json_already_is_left_as_it_is() -> None:
    value = {"a": Encoded(["[", "1,2", "]"]), "b": [{"c": Encoded(['"x"'])}, 3], "d": {}}
    assert encoded(value) == '{"a":[1,2],"b":[{"c":"x"},3],"d":{}}'
