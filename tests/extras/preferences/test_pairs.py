"""Pairs from files, with what is refused in them, and made-up ones."""

from collections.abc import Callable
from typing import Any

import pytest

from grpo_pl.extras.preferences.pairs import BrevityPreferences, Preference, PreferenceFile, read_preferences

GOOD = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "source": "ignored"}


def test_a_file_holds_texts_or_messages(jsonl: Callable[..., str]) -> None:
    chat = {
        "prompt": [{"role": "user", "content": "Hi"}],
        "chosen": [{"role": "assistant", "content": "Hello!"}],
        "rejected": [{"role": "assistant", "content": "What?"}],
    }
    file = jsonl([GOOD, chat])
    assert read_preferences(file) == [Preference("1+1=", "2", "3"), Preference("Hi", "Hello!", "What?")]
    assert read_preferences(file, skip=1) == [Preference("Hi", "Hello!", "What?")]
    assert len(read_preferences(jsonl([{}, GOOD]), skip=1)) == 1  # what is left out is not checked


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "1+1=", "chosen": "2"}, "line 2 .* needs prompt, chosen and rejected; there is no rejected"),
        ({"text": "2"}, "there is no prompt and no chosen and no rejected"),
        ({**GOOD, "rejected": "2"}, "line 2 .* chosen and rejected are equal, '2'"),
        ({**GOOD, "chosen": 2}, "chosen must be a text or a list of messages, got 2"),
    ],
)
def test_a_row_that_is_no_pair_is_named_by_its_line(jsonl: Callable[..., str], row: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_preferences(jsonl([GOOD, row]))


def test_no_prompt_is_trained_on_and_held_out(jsonl: Callable[..., str]) -> None:
    rows = [{"prompt": f"{i % 40}", "chosen": f"a{i}", "rejected": "b"} for i in range(200)]
    source = PreferenceFile(path=jsonl(rows), val_share=0.25)
    train, held_out = source.training(), source.held_out()
    assert len(train) + len(held_out) == 200 and 20 <= len(held_out) <= 80
    assert not {pair.prompt for pair in train} & {pair.prompt for pair in held_out}
    with pytest.raises(ValueError, match=r"40 prompts of .* are in .* as well"):
        PreferenceFile(path=source.path, val_path=source.path).training()


@pytest.mark.parametrize("rows", [[], [GOOD]])
def test_a_file_without_pairs_to_train_on_or_hold_out_is_refused(jsonl: Callable[..., str], rows: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"rows.jsonl holds no (training|held-out) pairs"):
        PreferenceFile(path=jsonl(rows)).training()


def test_made_up_pairs_prefer_the_shorter_thought() -> None:
    source = BrevityPreferences(count=50, val_count=20)
    train, held_out = source.training(), source.held_out()
    assert len(train) == 50 and len(held_out) == 20 and source.training() == train
    assert not {pair.prompt for pair in train} & {pair.prompt for pair in held_out}
    for pair in [*train, *held_out]:
        assert pair.chosen.count("\n") < pair.rejected.count("\n") <= 4
        assert pair.chosen.startswith("<think>") and pair.rejected.endswith("}</answer>")
