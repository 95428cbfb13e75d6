"""The scripts of texts, and their words, also where a script has no spaces between words."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache

from rlhf.data.normal import normalise

_LATIN = re.compile("[A-Za-z]")
_TOGETHER = {"Cjk": "CJK", "Hiragana": "CJK", "Katakana": "CJK"}


def script(text: str) -> str | None:
    """Return the script of most letters of the text: Latin, Cyrillic, CJK (kana too), …; None without letters."""
    if text.isascii():
        return "Latin" if _LATIN.search(text) else None
    counts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if character.isalpha():
            counts[_script_of(character)] += count
    return max(counts, key=lambda name: (counts[name], name)) if counts else None


@cache
def _script_of(letter: str) -> str:
    """Return the first word of a letter's Unicode name.

    It is the name of the letter's script, except for styled letters (Mathematical, …).
    """
    first = unicodedata.name(letter, "Unnamed").split()[0].capitalize()
    return _TOGETHER.get(first, first)


# Scripts that break lines between any two letters, or where a dictionary finds a word (classes ID and SA of Unicode's
# line breaking, UAX 14), and Tibetan: they write no spaces between words. Korean, of the first class, does.
_WITHOUT_SPACES = re.compile(
    "CJK|Bopomofo|Yi|Tangut|Nushu|Khitan|Hentaigana|Thai|Lao|Khmer|Myanmar|Tai|New|Ahom|Tibetan"
)


def words(text: str) -> list[str]:
    """Return the words of a text: what stands between white space, and each letter of a script without spaces.

    今天 is two words, iPhone手机 three. Marks belong to the letter before them; punctuation between such letters is no
    word. What counts is the normal form.
    """
    chunks = normalise(text).split()
    return chunks if text.isascii() else split_without_spaces(chunks)


def split_without_spaces(chunks: Iterable[str]) -> list[str]:
    """Return pieces of a text, those of scripts without spaces as their letters."""
    return [word for chunk in chunks for word in ((chunk,) if chunk.isascii() else _letters(chunk))]


def _letters(chunk: str) -> list[str]:
    """Return a piece of a text as its words; one that has no letter of a script without spaces is one word."""
    parts: list[str] = []
    run = ""  # what stands between two such letters
    for character in chunk:
        if character.isalpha() and _WITHOUT_SPACES.fullmatch(_script_of(character)):
            parts += [run, character]
            run = ""
        elif parts and not run and unicodedata.category(character).startswith("M"):
            parts[-1] += character
        else:
            run += character
    return [part for part in (*parts, run) if any(map(str.isalnum, part))] if parts else [chunk]
