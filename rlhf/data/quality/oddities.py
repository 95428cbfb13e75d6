"""Signs in one text that it was cut off or damaged. Each is a rule; none is a language model.

`ODDITIES` names those about the characters. docs/data.md says what each rule cannot see.

ftfy finds misread characters too, but takes ordinary Portuguese for them: its 6.3.1 flags two of the eleven ordinary
texts in our tests, which have AMANHÃ and MAÇÃ before a quotation mark or a dash.
"""

import re
from collections.abc import Callable
from html.entities import html5

from rlhf.data.quality.template_marks import FENCED

# Short answers and short last lines (headings, names, results) often end without a full stop though they are complete.
RESPONSE_WORDS, LINE_WORDS, ITEM_WORDS = 20, 6, 20

_LIST_ITEM = re.compile(r"\s*(?:[-*+•#>|]|\(?\w{1,3}[.)]\s)")


def unfinished(response: str) -> bool:
    """Return whether a response stops in the middle: in code, behind a comma or a colon, or after a bare word.

    A bare word counts only at the end of RESPONSE_WORDS or more and of a line of LINE_WORDS or more (ITEM_WORDS in a
    list), and not in an address or hashtag. The rule decides nothing in scripts without capital letters, some of which
    write no full stops. A digit at the end may be the result.
    """
    if response.count("```") % 2:
        return True
    line = response[response.rfind("\n") + 1 :]
    words = line.split()
    if response.endswith((",", ":", ";")):
        return len(words) > 1 or "\n" in response
    last_character = response[-1:]
    if (
        not last_character.isalpha()
        or last_character.lower() == last_character.upper()
        or any(mark in words[-1] for mark in "#@/._")
    ):
        return False
    least = ITEM_WORDS if _LIST_ITEM.match(line) else LINE_WORDS
    return len(words) >= least and len(response.split()) >= RESPONSE_WORDS


# A UTF-8 character that was read as cp1252 or Latin-1 appears as one of Â to ô, followed by one to three of these.
_FOLLOWING = "".join(chr(byte) + bytes([byte]).decode("cp1252", "ignore") for byte in range(0x80, 0xC0))
_MISREAD = re.compile(f"(?:[Â-ß][{_FOLLOWING}]|[à-ï][{_FOLLOWING}]{{2}}|[ð-ô][{_FOLLOWING}]{{3}})+")
_BYTE_OF = {ord(bytes([byte]).decode("cp1252", "ignore") or chr(byte)): byte for byte in range(0x80, 0xC0)}
_TYPESET = set("\xa0«»‹›‘’“”–—…")  # what good typesetting puts behind an accented letter: « café »


def mojibake(text: str) -> bool:
    """Return whether the text holds UTF-8 that was read as cp1252 or Latin-1 (cafÃ© for café), which can be undone.

    One character that can be undone is proof only where no language would write it: behind Â, Ã or ð, unless it ends a
    word in capitals (AMANHÃ…), or behind Ä, Å, á, â and ï if more than typesetting follows. Two in a row are always
    proof.
    """
    if text.isascii():
        return False
    for match in _MISREAD.finditer(text):
        run = match[0]
        typeset = _TYPESET.issuperset(run[1:])
        word = typeset and text[max(0, match.start() - 1) : match.start()].isupper()
        convincing = (run[0] in "ÂÃð" and not word) or (run[0] in "ÄÅáâï" and not typeset)
        undone = _undone(run)
        if undone and (convincing or len(undone) > 1):
            return True
    return False


def _undone(run: str) -> str:
    """Return the text that a run of characters was misread from; empty if it was none."""
    try:
        return run.translate(_BYTE_OF).encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        return ""


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
# Zero-width spaces, bidi embeddings, overrides and isolates; joiners behind a Latin letter, where nothing joins; tag
# characters outside the flags they are meant for. Thai to Khmer mark the ends of words with zero-width spaces.
_INVISIBLE = re.compile(
    "(?<![\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff])\u200b|[\u2060\ufeff\u202a-\u202e\u2066-\u2069]"
    "|(?<=[A-Za-z])[\u200c\u200d]|(?<![\U0001f3f4\U000e0020-\U000e007f])[\U000e0001-\U000e007f]"
)
_NAMES = "p|br|div|span|a|b|i|u|em|strong|ul|ol|li|table|tr|td|th|h[1-6]|img|font|sup|sub"
_TAG = re.compile(rf"</?(?:{_NAMES})(?:\s[^<>]*)?/?>", re.I)
_ENTITY = re.compile(r"&(\w+;|#\d+;|#[xX][0-9a-fA-F]+;)")


def control(text: str) -> bool:
    """Return whether the text has control characters other than tab and line end."""
    return bool(_CONTROL.search(text))


def invisible(text: str) -> bool:
    """Return whether the text has characters that show nothing, or that turn the order of what is shown."""
    return not text.isascii() and bool(_INVISIBLE.search(text))


def html(text: str) -> bool:
    """Return whether the text has tags or entities of HTML outside code between backticks."""
    if "<" not in text and "&" not in text:
        return False
    text = FENCED.sub("", text)
    return bool(_TAG.search(text)) or any(e[0] == "#" or e in html5 for e in _ENTITY.findall(text))


def replaced(text: str) -> bool:
    """Return whether the text has U+FFFD, which decoders put where they could not read."""
    return "\ufffd" in text


ODDITIES: dict[str, Callable[[str], bool]] = {
    "replaced": replaced,
    "mojibake": mojibake,
    "control": control,
    "invisible": invisible,
    "html": html,
}
