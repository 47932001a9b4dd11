r"""One spelling for answers that differ in typography only, and answers that are no text to be read at all."""

from __future__ import annotations

import html
import re
import unicodedata
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from grpo_pl.rewards.completion_text import BRACES
from grpo_pl.rewards.mathematics.measures import read_measure

MAX_NESTING = 12
MAX_DIGIT_RUN = 400
_CONTROL = frozenset({"Cc", "Cf", "Cs", "Co"})


def has_compatibility_markup(text: str) -> bool:
    """True if a character becomes a brace, backslash or dollar sign under NFKC: the text that was matched as the
    content of a box could then end at another brace."""
    return any(not char.isascii() and set(unicodedata.normalize("NFKC", char)) & set("{}\\$") for char in text)


def depths(text: str) -> list[int]:
    """How many brackets are open at each character of ``text``, itself included."""
    return list(accumulate((char in "([{") - (char in ")]}") for char in text))


def oversize(text: str, max_chars: int) -> str:
    """The reason why ``text`` is too large to be parsed (characters, nesting, digits of a number), or ``""``."""
    if len(text) > max_chars:
        return f"{len(text)} characters, at most {max_chars} are judged"
    deepest = max([0, *depths(text), *(run.count("|") for run in re.findall(r"\|[|\s]*", text))])
    if deepest > MAX_NESTING:
        return f"nested {deepest} deep, at most {MAX_NESTING} is judged"
    if re.search(rf"\d{{{MAX_DIGIT_RUN + 1}}}", text):
        return f"a number of more than {MAX_DIGIT_RUN} digits"
    return ""


def has_control_characters(text: str) -> bool:
    """True for NUL, direction marks, zero-width characters and lone surrogates, which ordinary answers do not hold."""
    return any(unicodedata.category(c) in _CONTROL and c not in "\n\t\r\f" for c in text)


CURRENCIES = {
    "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee", "₽": "rouble", "₩": "won", "₪": "shekel", "฿": "baht",
    "¢": "cent",
}  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_RAISED_UNIT = re.compile("(?<=\\d)[ \u00a0]?([ckdm]?m|ft|in|yd|mi)([²³])(?=[\\s.$]*$)")
_RAISED_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_LOWERED_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SYMBOLS = {
    "π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "−": "-", "–": "-",
    "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "°": r"^\circ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "⁄": "/", "，": ",", "′": "'", "’": "'", "⩽": r"\le ", "⩾": r"\ge ", "≦": r"\le ",
    "≧": r"\ge ", "∖": r"\setminus ", "∧": r"\land ", "∨": r"\lor ", "∠": r"\angle ", "△": r"\triangle ", "→": r"\to ",
    "≡": r"\equiv ", "∣": "|", "∗": "*", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}", "٫": ".", "٬": ",", "…": r"\ldots ", "⟨": r"\langle ", "⟩": r"\rangle ",
}  # fmt: skip


def _half_line(sign: str, end: str) -> str:
    r"""The numbers above or below ``end`` as an interval: ``(2,\infty)`` for ``\mathbb{R}_{>2}``."""
    closed = sign in (r"\ge", r"\le")
    return f"{'(['[closed]}{end},\\infty)" if sign in (">", r"\ge") else f"(-\\infty,{end}{')]'[closed]}"


_REWRITES: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"(?<!\d)(\d{1,3}(?:'\d{3})++)(?![\d'])", lambda number: number[1].replace("'", "")),  # 1'000'000
        (r"(?<![\d.,])(\d{1,3}(?:\.\d{3}){2,}+)(?![\d.]|,\d)", lambda number: number[1].replace(".", "")),  # 1.000.000
        (r"(?<=\d)\{\}(?=\d)", ""),
        (r"\\(?:displaystyle|textstyle|left|right|middle|[bB]igg?[lrm]?|fbox|limits|nolimits)(?![a-zA-Z])", ""),
        (r"\\(?:[lr]?vert|mid)(?![a-zA-Z])", "|"),
        (r"\\abs\*?\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"|\1|"),
        (r"\\[lr]?Vert(?![a-zA-Z])|‖", r"\\|"),
        (r"\\norm\*?\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"\\|\1\\|"),
        (r"^(?:[^|]*(?<!\\)\|\|[^|]+(?<!\\)\|\|)+[^|]*$", lambda bars: bars[0].replace("||", r"\|")),  # not |a||b||c|
        (r"(?<=\d),\s*\\!\s*(?=\d{3}(?!\d))", ","),
        (r"(?<!\\)\\[,;:! ]|\\(?:q?quad|enspace|thinspace)(?![a-zA-Z])|~", " "),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"(?<!\\)\](\s*[^\[\](),;\s][^\[\](),;]*)[,;]([^\[\](),;]+)\[", r"(\1,\2)"),  # ]0, 1[
        (r"(?<!\\)\[([^\[\](),;]+)[,;]([^\[\](),;]+)\[(?![^\[\]]*\])", r"[\1,\2)"),
        (r"(?<![\w)}\]\\])\]([^\[\](),;]+)[,;]([^\[\](),;]+)\]", r"(\1,\2]"),
        (r"(?:\{\})?[_^]\s*(?:\{(\d+)\}|(\d))\s*C\s*_\s*(?:\{(\d+)\}|(\d))", r"\\binom{\1\2}{\3\4}"),
        (
            r"(?:\\langle(?![a-zA-Z])|^\s*<)((?:[^<>|,\\]|\\(?![lr]angle))++,(?:[^<>|\\]|\\(?![lr]angle))++)"
            r"(?:\\rangle(?![a-zA-Z])|>)",
            r"(\1)",
        ),
        (r"\^\s?(\\frac ?\{[^{}]*\} ?\{[^{}]*\})", r"^{\1}"),
        (r"\\degree(?![a-zA-Z])", r"^\\circ"),
        (r"\\(vec|hat|bar|tilde|overline)\s+([A-Za-z])(?![A-Za-z])", r"\\\1{\2}"),
        (r"\\(?:mathrm|rm|mathit|text|operatorname)\s*(?:\{\s*([ei])\s*\}|\s([ei])(?![a-zA-Z]))", r"\1\2"),
        (r"\\(?:text(?:bf|it|rm|sf|tt|normal)|emph|mbox|math(?:rm|bf|it|sf)|ce)(?=\s*\{)", r"\\text"),
        (r"\\([lg]e)q(?:slant|q)?(?![a-zA-Z])", r"\\\1"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\mathbb\s*R(?![a-zA-Z])", r"\\mathbb{R}"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (
            r"\\mathbb\{R\} ?(?:_\{? ?(>|<|\\[gl]e) ?(-?[\d.]+) ?\}?|[\^_]\{?([+-])\}?)",
            lambda half: _half_line(half[1] or {"+": ">", "-": "<"}[half[3]], half[2] or "0"),
        ),
        (r"(\d\.\d*)\\dot\s*\{?(\d)\}?(\d*+)\\dot\s*\{?(\d)\}?", r"\1\\overline{\2\3\4}"),
        (r"(\d\.\d*)\\(?:bar|dot)\s*(?:\{(\d+)\}|(\d))", r"\1\\overline{\2\3}"),
        (r"^([+-]?\d+\.\d*)\((\d+)\)$", r"\1\\overline{\2}"),
        (r"\s+", " "),  # before the next ones, which would try every length of a run of white space
        (r"\\(?:neq|not\s*=)(?![a-zA-Z])|(?<![\d)!])!=|(?<=\s)!=", r"\\ne "),
        (r"(?<![\\a-zA-Z])(exp|ln|log|sin|cos|tan)(?=\s?\()", r"\\\1"),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10} "),
        (r"\\log ?_ ?(?:e(?![a-zA-Z])|\{ ?e ?\})", r"\\ln "),
        (r"\+ ?/ ?-|\+-", r"\\pm "),
        (r"\( ?\\approx([^()]*)\)$", r"\\approx \1"),
        (r":=", "="),
        (r"\\#", ""),
        (r"^(?:([a-zA-Z]) ?: ?)?([a-z]) ?\\mapsto(?![a-zA-Z])", lambda m: f"{m[1] or 'f'}({m[2]})="),
        (r"^\\text ?\{ ?([^{}:=]*[^{}:=\d ]) ?: ?\}(?= ?[^ ])", r"\\text{\1}="),  # \text{Answer: }5
        (r"\\(?:l|c|d)?dots[bcmio]?(?![a-zA-Z])|\.\.\.", r"\\ldots "),
        (r"\\(?:pounds|textsterling)(?![a-zA-Z])(?:\{\})?", "£"),
        (r"\\\$", r"\\text{dollar} "),
        (r"(?<=\d)\s*\$(?=\s*$)", r"\\text{ dollar}"),
        (r"^\s*\$(?=\s*[\d.,]+\s*$)", r"\\text{dollar} "),
        (r"([€£¥₹₽₩₪฿¢])", lambda sign: rf"\text{{ {CURRENCIES[sign[0]]}}} "),
        (r"\$|\\\(|\\\)|\\\[|\\\]", " "),
        (r"^\s*\\text\{\s*([-+]?[\d.,/]+)\s+([^{}]*)\}\s*$", r"\1\\text{ \2}"),
        (
            r"(?<![\\a-zA-Z])(?:percent(?:age)?|per cent|pct)(?![a-zA-Z])"
            r"|\\text\{\s*(?:percent(?:age)?|per cent|pct)\.?\s*\}",
            r"\\%",
        ),
        (r"(?<!\\)%", r"\\%"),
        (r"(?<![\\a-zA-Z])(?:infinity|inf)(?![a-zA-Z])", r"\\infty"),
        (r"\\text\s*\{\s*(-?\s*\\infty)\s*\}", r"\1"),
    ]
]
_IN_WORDS = re.compile(
    r"(?<=\S),?\s*(?:\\text\{\s*,?\s*(and|or)\s*\}|(?<![\\a-zA-Z{])(and|or)(?![a-zA-Z}]))(?=\s*[^\s}.,;:!?])"
)
_MINUS_PLUS = re.compile(r"\\mp(?![a-zA-Z])")
_CONDITION = re.compile(r"[<>]|\\(?:le|ge|ne|in)(?![a-zA-Z])")


def _connective(match: re.Match[str]) -> str:
    return r" \land " if match[match.lastindex or 0] == "and" else r" \lor "


_ENTITY = re.compile(r"&#?\w+;")
_TAG = re.compile(r"<(su[bp]|[biu]|em|strong|code|span|p)>([^<>]*)</\1>")
_EMPHASIS = re.compile(r"\s*(\*\*|\*|__|`)([^*`]+)\1[\s.]*")
_PYTHON_POWER = re.compile(r"\*\*\s*(?:\(([^()]*)\)|(-?\w+(?:\.\d+)?))")


def _without_markup(text: str) -> str:
    """``text`` in LaTeX where it was HTML, Markdown or Python: ``x<sup>2</sup>``, ``&le;``, ``**5**``, ``x**2``."""
    if "&" in text:
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    if "</" in text:
        signs = {"sup": "^", "sub": "_"}
        text = _TAG.sub(lambda tag: f"{signs[tag[1]]}{{{tag[2]}}}" if tag[1] in signs else tag[2], text)
    if (emphasis := _EMPHASIS.fullmatch(text)) is not None:
        text = emphasis[2]
    return _PYTHON_POWER.sub(lambda power: f"^{{{power[1] or power[2]}}}", text)


@lru_cache(maxsize=8192)
def canonical(text: str) -> str:
    """One spelling for answers that differ only in typography: fullwidth digits, spacing commands, ``\\dfrac`` …"""
    text = _without_markup(text)
    # NFKC turns raised digits and vulgar fractions into plain digits (5² into 52), so these are rewritten first.
    # With a raised digit 5m² is five square metres; 5m^2 may be a product.
    result = _RAISED_UNIT.sub(lambda unit: rf"\text{{ {unit[1]}}}^{unit[2].translate(_RAISED)}", text)
    result = _RAISED_RUN.sub(lambda run: "^{" + run.group().translate(_RAISED) + "}", result)
    result = _LOWERED_RUN.sub(lambda run: "_{" + run.group().translate(_LOWERED) + "}", result)
    result = "".join(
        f" {unicodedata.normalize('NFKC', char)}" if unicodedata.decomposition(char).startswith("<fraction>") else char
        for char in result
    )
    result = "".join(_SYMBOLS.get(char) or (str(unicodedata.decimal(char, "")) or char) for char in result)
    pieces = (result[i : i + _PIECE] for i in range(0, len(result), _PIECE))  # NFKC orders marks in quadratic time
    result = "".join(_SYMBOLS.get(char, char) for piece in pieces for char in unicodedata.normalize("NFKC", piece))
    result = plain_latex(result)
    for pattern, replacement in _REWRITES:
        result = pattern.sub(replacement, result)
    if r"\pm" not in result:
        result = _MINUS_PLUS.sub(r"\\pm", result)  # alone it says the same
    in_words = _connective if _CONDITION.search(result) else ","  # 1 or 2 is a list
    result = _IN_WORDS.sub(in_words, result)
    result = re.sub(r"(?<=[\w})])\s*[.,;]+$", "", " ".join(result.split())).strip()
    for _ in range(MAX_NESTING):  # each pair doubles the work of the parser
        if result.startswith("{") and group_end(result, 0) == len(result):
            result = result[1:-1].strip()
    return result


_PIECE = 1000


# --- LaTeX whose reading needs matched braces: fonts and colours around mathematics, ``\over``, and the like ---

_FONTS = (
    "boldsymbol|bm|pmb|mathbf|mathsf|mathtt|mathit|mathnormal|mathrm|textbf|textit|textsf|texttt|textrm|textnormal|text"
    "|emph|underline|ensuremath|mbox"
)
_FONT = re.compile(rf"\\({_FONTS})\s*(?=\{{)")
_COLOUR = re.compile(r"\\(?:textcolor|color|colorbox)\s*(?:\[[^\[\]]*\]\s*)?\{[^{}]*\}")
_SWITCHED_WORDS = re.compile(r"\{\s*\\(?:rm|bf|it|sf|tt|em)\s+([A-Za-z]{2}[A-Za-z .]*)\}")
_SWITCH = re.compile(
    r"\\(?:bf|bfseries|it|itshape|sf|tt|em|boldmath|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])\s*"
)
_INFIX = re.compile(r"\\(over|choose)(?![a-zA-Z])\s*")
_DOUBLED = re.compile(
    r"\\\\(?=(?:[dtc]?frac|sqrt|leq?|geq?|neq?|lt|gt|pi|infty|times|cdot|pm|in|cup|cap|setminus|text|mathrm|mathbb|left|right"
    r"|alpha|beta|gamma|theta|lambda|sin|cos|tan|log|ln|approx|degree|circ|q?quad|emptyset|boxed|[{}%$])(?![a-zA-Z]))"
)
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-zπ])|(?=\{))")


def group_end(text: str, start: int) -> int:
    """The place behind the brace that closes the one at ``start``; -1 if none does."""
    depth = 0
    for brace in BRACES.finditer(text, start):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return brace.end()
    return -1


def plain_latex(text: str) -> str:
    r"""``text`` without fonts and colours around mathematics, with ``\frac`` for ``\over``, ``\sqrt`` for ``√``, and a
    single backslash before a command where a second one can be no line break."""
    if r"\begin" in text:
        text = _as_list(_ROW_SPACING.sub(r"\\\\", text.replace("smallmatrix", "matrix")))
    elif r"\\" in text:
        text = _DOUBLED.sub(r"\\", text)
    text = _ROOT.sub(lambda root: _ROOTS[root[1]] + (f"{{{root[2] or root[3]}}}" if root[2] or root[3] else ""), text)
    if "\\" not in text:
        return text
    text = _SWITCH.sub("", _SWITCHED_WORDS.sub(r"\\text{\1}", _COLOUR.sub("", text)))
    text = _with_braces(_without_fonts(text))
    for _ in range(10):
        if not (infix := _INFIX.search(text)):
            break
        text = _with_prefix(text, infix)
    return text


_ROW_SPACING = re.compile(r"\\\\\*?\s*\[\s*-?[\d.]+\s*\\?[a-z]+\s*\]")
_SYSTEM = re.compile(
    r"(?:(?:\\left\s*)?\\[{.]\s*|\\left\s*\.\s*)?"
    r"\\begin\s*\{(cases|rcases|dcases|array|(?:aligned|gathered|split|align|gather|eqnarray|alignedat)\*?)\}(?:\s*\{[lcr\d|]*\})?"
    r"((?:[^\\]|\\(?!begin|end\s*\{))*+)\\end\s*\{\1\}(?:\s*\\right\s*(?:\.|\\\}))?"
)
_RELATES = re.compile(r"\s*(?:[=<>]|\\(?:le|ge|leq|geq|ne|neq|approx|in|lt|gt|equiv)(?![a-zA-Z]))")


def _as_list(text: str) -> str:
    r"""``text`` with the rows of a system or derivation as a list: ``x=1, y=2``. Matrices, and values with a condition
    in a second column, stay."""

    def listed(system: re.Match[str]) -> str:
        rows: list[str] = []
        for row in system[2].split(r"\\"):
            first, *cells = row.split("&")
            if any(cell.strip() and not (_RELATES.match(cell) or _RELATES.search(first + " ")) for cell in cells):
                return system[0]
            joined = "".join([first, *cells]).strip().rstrip(",;. ")
            if joined:
                rows.append(joined)
        return ", ".join(rows)

    return _SYSTEM.sub(listed, text)


_TWO_ARGUMENTS = re.compile(r"\\[dtc]?(?:frac|binom)(?![a-zA-Z])")
_ARGUMENT = re.compile(r"\s*(?:(?P<group>\{)|(?P<token>\\[a-zA-Z]+|[^\\{}\s]))")


def group_ends(text: str) -> dict[int, int]:
    """The place of each opening brace -> the place behind the one that closes it."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for brace in BRACES.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            ends[opened.pop()] = brace.end()
    return ends


def _with_braces(text: str) -> str:
    r"""``text`` with braces around the arguments of ``\frac`` and ``\binom`` as TeX finds them: ``\frac\pi2`` is
    ``\frac{\pi}{2}``."""
    commands = list(_TWO_ARGUMENTS.finditer(text))
    ends = group_ends(text) if commands else {}
    marks: list[tuple[int, str]] = []
    for command in commands:
        at = command.end()
        for _ in range(2):
            argument = _ARGUMENT.match(text, at)
            if argument is None:
                break
            at = argument.end()
            if argument["group"]:
                at = ends.get(at - 1, len(text))
            else:
                marks += [(argument.start("token"), "{"), (at, "}")]
    bounds = [(0, ""), *sorted(marks, key=lambda mark: mark[0]), (len(text), "")]  # at one place } comes before {
    return "".join(text[start:end] + mark for (start, _), (end, mark) in pairwise(bounds))


def _is_mathematics(font: str, content: str) -> bool:
    """True if the content of a font command is a number or a formula rather than words or a name: ``\\textbf{5}``."""
    words = re.sub(r"\\[A-Za-z]+", " ", content)
    if font == "text":  # \text{5 cm} and \text{5 or 6} are read as they stand
        return re.fullmatch(r"(?=\D*\d)[\d\s.,+*/=^-]+", words) is not None and content == words
    if font == "mathrm" and not re.search(r"^\s*\d|[+=]", content):  # m/s^2
        names = re.findall(r"[^\W\d_]+", words)
        if names and all(read_measure(name) for name in names):
            return False
    return re.search(r"[A-Za-z]{2}|[^\x00-\x7f]", words) is None and re.search(r"[\d+=^/\\-]", content) is not None


def _without_fonts(text: str) -> str:
    """``text`` with a bare group in place of each font command around mathematics."""
    parts, at = [], 0
    while match := _FONT.search(text, at):
        end = group_end(text, match.end())
        if end < 0:
            break
        if _is_mathematics(match[1], text[match.end() + 1 : end - 1]):
            parts.append(text[at : match.start()])
            text, at = text[match.end() :], 0
        else:
            parts.append(text[at : match.end() + 1])
            at = match.end() + 1
    return "".join([*parts, text[at:]])


def _with_prefix(text: str, infix: re.Match[str]) -> str:
    r"""``{a \over b}`` as ``\frac{a}{b}``, ``{n \choose k}`` as ``\binom{n}{k}``, up to the braces around them."""
    depth, left = 0, infix.start()
    while left > 0 and not (depth == 0 and text[left - 1] == "{"):
        depth += (text[left - 1] == "}") - (text[left - 1] == "{")
        left -= 1
    depth, right = 0, infix.end()
    while right < len(text) and not (depth == 0 and text[right] == "}"):
        depth += (text[right] == "{") - (text[right] == "}")
        right += 1
    command = r"\frac" if infix[1] == "over" else r"\binom"
    fraction = f"{command}{{{text[left : infix.start()].strip()}}}{{{text[infix.end() : right].strip()}}}"
    return text[:left] + fraction + text[right:]
