"""The normal form of texts: two spellings of one text have the same. It is compared, and never trained on."""

import re
import unicodedata
from collections.abc import Hashable, Sequence
from decimal import Decimal

from rlhf.data.rows import Message

# Unicode's property Default_Ignorable_Code_Point, which includes what it reserves for such characters: joiners, marks
# of direction, fillers, byte order marks, variation selectors. Tags behind a black flag say which flag it is.
_IGNORABLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_SHOWING_NOTHING = re.compile(f"(\U0001f3f4[\U000e0020-\U000e007f]+)|[{_IGNORABLE}]+")
_BLANK = ("Cc", "Cf", "Zl", "Zp", "Zs")  # categories of controls, of formats and of white space
# Thai and Lao, Tibetan and Myanmar, Khmer, kana, and the letters of Chinese, which stand without spaces between words
_APART = "\u0e00-\u0eff\u0f00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_APART}]|[^\s{_APART}]+")
_BLANK_BRAILLE = "\u2800"
_WIDTHS = {  # full-width and half-width forms, which repeat other characters: ＡＢＣ１２３, ｱｲｳ
    code: chr(int(form.partition("> ")[2], 16))
    for code in range(0xFF00, 0xFFF0)
    if (form := unicodedata.decomposition(chr(code))).startswith(("<wide>", "<narrow>"))
}

# A minus as keyboards and typesetters write it: minus signs, hyphens, and dashes no longer than a number is wide
_MINUSES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u207b\u2212\u2796\ufe63\uff0d"), "-")
# A minus with a space behind it is a sign where nothing before it can be what it is taken from, and where it parts no
# two clauses: at the beginning, behind = : ( and the like, and behind a verb that says what something is.
_SPACED_SIGN = re.compile(
    r"(\A\s*|[^\w\s)\]}.,;!?%'\"’”\-][^\S\n]*|\b(?:is|are|was|were|equals?)[^\S\n]+)-[^\S\n]+(?=\.?\d)"
)
_LIST = re.compile(r"^\s*-\s.*\n(?:.*\n)*?\s*-\s", re.MULTILINE)  # two lines that begin so
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


def normalise(text: str) -> str:
    """Return a text in Unicode's form NFC, without what shows nothing, in characters of ordinary width.

    Each run of white space is one space, with none at the two ends. Line ends of any kind and no-break spaces are white
    space. What else Unicode calls compatible stays as it is: x² is not x2.
    """
    return " ".join(_plain_characters(text).split())


def _plain_characters(text: str) -> str:
    """Return a text in form NFC, without what shows nothing, in characters of ordinary width."""
    if text.isascii():
        return text
    shown = _SHOWING_NOTHING.sub(lambda match: match[1] or "", text)
    return unicodedata.normalize("NFC", shown.translate(_WIDTHS))


def words(text: str) -> list[str]:
    """Return the words of a text: what stands between white space, and each letter of a script without spaces."""
    if text.isascii():
        return text.split()
    return [word for word in _WORD.findall(normalise(text)) if any(map(str.isalnum, word))]


def says_something(text: str) -> bool:
    """Return whether a text has a character that can be seen. One of zero-width characters alone has none."""
    return any(
        character != _BLANK_BRAILLE and unicodedata.category(character) not in _BLANK for character in normalise(text)
    )


def plain_signs(text: str) -> str:
    """Return a text in plain characters, each minus of a number as a hyphen in front of it: −5, –5, - 5, －５ are -5.

    What takes one number from another (10 - 5), a range (3–5), a dash behind a word, and an item of a list stay.
    """
    text = _plain_characters(text).translate(_MINUSES)
    return text if "-" not in text or _LIST.search(text) else _SPACED_SIGN.sub(r"\1-", text)


def normal_answer(right_answer: str) -> Hashable:
    """Return what is equal for spellings of one right answer: the value of a number (10, 10.0, 1e1), or the text."""
    text = normalise(right_answer)
    number = plain_signs(text)
    return Decimal(number) if _NUMBER.fullmatch(number) else text


def normal_prompt(prompt: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    """Return the roles and the normal texts of a prompt."""
    return tuple((message.role, normalise(message.content)) for message in prompt)
