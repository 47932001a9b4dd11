import pytest

from grpo_pl.rewards import LanguageConsistencyReward
from grpo_pl.rewards.language import words_by_script


def value(text: str, language: str = "en") -> float | None:
    return LanguageConsistencyReward(language=language)([text], [""], {})[0].value  # type: ignore[arg-type]


def test_words_are_counted_by_script() -> None:
    assert words_by_script("two words") == ["LATIN", "LATIN"]
    assert words_by_script("所以 yes") == ["CJK", "CJK", "LATIN"]
    assert words_by_script("don't re-use да") == ["LATIN", "LATIN", "CYRILLIC"]


def test_formulas_code_tags_numbers_and_variables_are_not_prose() -> None:
    text = "<think>$x + yz$ \\(ab\\) \\[ cd \\] \\boxed{ef} \\frac 12 x y 3 ```print(x)```</think>"
    assert words_by_script(text) == []


@pytest.mark.parametrize("word", ["aПривет", "Приветa", "Рrice", "αbc", "a한국"])
def test_a_word_of_several_scripts_is_in_no_language(word: str) -> None:
    assert words_by_script(word) == ["MIXED"]
    for language in ("en", "ru", "el", "ko"):
        assert value(word, language) == 0.0


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Ｗｅ ａｄｄ", "en"), ("𝐖𝐞 𝑎𝑑𝑑 𝓉𝒽𝑒 𝕟𝕦𝕞𝕓𝕖𝕣𝕤", "en"), ("oﬀ", "en"), ("ﾊﾝｶｸ", "ja"), ("ﾡﾢ", "ko"), ("人々", "zh"),
        ("ﺍﺏﺕ", "ar"),
    ],
)  # fmt: skip
def test_letters_of_another_width_or_style_keep_their_script(text: str, language: str) -> None:
    assert value(text, language) == 1.0


def test_an_apostrophe_that_is_a_letter_is_in_every_script() -> None:
    assert words_by_script("don\u02bct") == ["LATIN"]


def test_a_formula_that_is_not_closed_hides_nothing() -> None:
    assert words_by_script("\\[ да \\( да $$ да") == ["CYRILLIC"] * 3
    assert words_by_script("\\[ да \\[ да \\] нет") == ["CYRILLIC"]
    assert words_by_script("so ```print(x)``` and ```y = да") == ["LATIN", "LATIN"]


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("we add the numbers", "en", 1.0), ("we add 数字", "en", 0.5), ("我们 add", "zh", 2 / 3),
        ("これは漢字", "ja", 1.0),
        ("это test", "ru", 0.5), ("größer als", "de", 1.0),
    ],
)  # fmt: skip
def test_value_is_the_share_of_target_words(text: str, language: str, expected: float) -> None:
    assert value(text, language) == pytest.approx(expected)


def test_silence_does_not_pay() -> None:
    score = LanguageConsistencyReward()(["$x=5$"], [""], {})[0]
    assert (score.value, score.status) == (0.0, "no_answer")


def test_unknown_languages_are_refused() -> None:
    with pytest.raises(ValueError, match="klingon"):
        LanguageConsistencyReward(language="klingon")  # type: ignore[arg-type]
