"""The character tokenizer: what goes in comes out, and a tag is one token."""

import string

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from grpo_pl.policy.tokenizer import CHARACTERS, character_tokenizer

PRINTABLE = "\n" + "".join(chr(code) for code in range(32, 127))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def test_every_printable_ascii_character_makes_the_round_trip(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = _ids(tokenizer, PRINTABLE)
    assert len(ids) == len(set(ids)) == 96 and tokenizer(PRINTABLE).input_ids == ids  # nothing is added
    assert tokenizer.decode(ids, skip_special_tokens=True) == PRINTABLE
    assert set(string.ascii_letters + string.digits + string.punctuation + " \n") == set(CHARACTERS)


@pytest.mark.parametrize("text", ["  two  spaces ", "a ,b . c !", " 'tis n't", "\n\n", "x  \n y", "3+4=7\n"])
def test_spaces_and_line_breaks_are_kept(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(_ids(tokenizer, text), skip_special_tokens=True) == text


def test_a_tag_is_one_token_inside_text_and_is_decoded(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "<think>a<b</think><answer>\\boxed{12}</answer>"
    ids = _ids(tokenizer, text)
    assert len(ids) == 4 + len("a<b") + len("\\boxed{12}")
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_other_characters_are_unknown_one_token_each(tokenizer: PreTrainedTokenizerBase) -> None:
    assert _ids(tokenizer, "a\té→") == [*_ids(tokenizer, "a"), *[tokenizer.unk_token_id] * 3]


def test_special_tokens_are_three_different_ones_and_vanish_from_text(tokenizer: PreTrainedTokenizerBase) -> None:
    special = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert len(set(special)) == 3
    assert not set(special) & set(_ids(tokenizer, PRINTABLE))
    assert tokenizer.decode([*_ids(tokenizer, "7"), tokenizer.eos_token_id], skip_special_tokens=True) == "7"


def test_a_saved_tokenizer_loads_as_auto_tokenizer_and_agrees(
    tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    text = f"<think>{PRINTABLE}</think> é"
    assert _ids(loaded, text) == _ids(tokenizer, text)
    assert loaded.decode(_ids(loaded, text)) == tokenizer.decode(_ids(tokenizer, text))
    assert (loaded.pad_token_id, loaded.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert len(loaded) == len(tokenizer) == 96 + 3 + 4


def test_tags_and_characters_are_those_asked_for() -> None:
    assert len(_ids(character_tokenizer(), "<think>")) == len("<think>")
    tokenizer = character_tokenizer((), "0123456789")
    assert len(tokenizer) == 10 + 3
    assert _ids(tokenizer, "3a1") == [6, tokenizer.unk_token_id, 4]


@pytest.mark.parametrize("characters", ["", "abca"])
def test_no_characters_and_repeated_ones_are_refused(characters: str) -> None:
    with pytest.raises(ValueError, match=r"policy\.characters must be different"):
        character_tokenizer((), characters)
