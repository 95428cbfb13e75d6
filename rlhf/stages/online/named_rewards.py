"""The named rewards of texts. Each is a class of its options, whose instance is the reward function.

    exact_answer                      1 if it is the answer; case, white space and . , ; : ! ? at the end do not count
    numeric_answer(tolerance=0.01)    1 if its last number is the answer, within a relative tolerance
    math_answer                       1 if its last mathematical expression equals the answer (needs the extra `math`)
    reasoning_gym(threshold=1)        the score of the task's verifier; with `threshold`, 1 if it is at least that
    regex(pattern='^Yes')             1 if the pattern is found
    length(most=60)                   0 up to `most` words, then falling to -1 at twice as many; or `unit='tokens'`
    json_valid(keys=['name'])         1 if it is JSON; with `keys`, if it is an object that has them

`exact_answer`, `numeric_answer` and `reasoning_gym` take `extract='#### (.*)'`: a pattern whose last match holds what
is compared. An `answer_fault` returns why no response can match a right answer, or None. A guest imports this module,
so it imports little.
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rlhf.data.normal import normalise, plain_signs, says_something
from rlhf.data.scripts import words
from rlhf.data.worlds import gym
from rlhf.run.packages import require_found

QUOTED = 60  # characters of an answer in a message

# 7, 1,234.50, .5, -1e3, -$5. A minus after a word or a closing bracket is not a sign (10-5, f(x)-5), and a point after
# a word or another point does not begin a number (v1.2.5, an ellipsis). A comma, an apostrophe, an underscore or TeX's
# 1{,}250, 1,\!250 and 1\,250 group three digits, or separate two numbers (3,4). Indian commas group two digits before
# the last three: 1,00,000. Spaces group digits where the whole run of digits and spaces can be one number: 1 250 and
# 12 345 678, not 3 4, 1000 200 or 1 250 30.
SPACE = r"[ \u00a0\u2007\u2009\u202f]"  # plain, no-break, of a figure's width, thin, narrow no-break
MARK = r"(?:,\\!|\{,\}|\\[,;: ]|[,_'\u2019])"
BY_SPACES = rf"(?<![\w.])(?<!\d{SPACE})[1-9]\d{{0,2}}(?P<space>{SPACE})\d{{3}}(?:(?P=space)\d{{3}})*(?!,?\d|{SPACE}\d)"
BY_MARKS = rf"\d{{1,3}}(?P<mark>{MARK})\d{{3}}(?:(?P=mark)\d{{3}})*(?!\d)"
BY_LAKHS = r"\d{1,2}(?:,\d{2})+,\d{3}(?!\d)"
SIGN = r"(?:(?<![\w)\]}])-(?:\\?[$£¥฿\u20a0-\u20cf])?)?"  # the range has the signs of other currencies
NUMBER = re.compile(rf"{SIGN}(?:(?:{BY_SPACES}|{BY_MARKS}|{BY_LAKHS}|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d+)?")
# A tuple, a set or an interval in plain text, with at most one pair of brackets in each member: (1,2), {sqrt(2), 1}
LISTED = re.compile(r"(?<!\w)[(\[{](?:[^()\[\]{},]|\([^()]*\))+(?:,(?:[^()\[\]{},]|\([^()]*\))+)+[)\]}]")
# Mathematics between TeX's marks. Two prices are none: a $ that begins has no space behind it, and one that ends has
# neither a space before it nor a digit behind it.
MARKED = re.compile(r"(?<!\\)(?:\$(?=\S)[^$]*(?<=\S)\$(?!\d)|\\\(|\\\[|\\boxed)")
# Commands of TeX without any word around them
BARE_TEX = re.compile(r"(?=[^\\]*\\)(?:\\[A-Za-z]+(?![A-Za-z])|\\(?![A-Za-z])|[^A-Za-z\\]|[A-Za-z](?![A-Za-z]))+")
CLOSING_MARKS = ".,;:!?。"  # which exact_answer ignores at the end


@dataclass(frozen=True, kw_only=True)
class ExactAnswer:
    extract: str | None = None

    def __post_init__(self) -> None:
        _compiled(extract=self.extract)

    def __call__(self, completions: list[str], answer: list[str]) -> list[float]:
        return [
            float(_is_exact(_extract(completion, self.extract), right))
            for completion, right in zip(completions, answer, strict=True)
        ]

    def answer_fault(self, answer: str) -> str | None:
        return None if _plain(answer) else "is empty"


@dataclass(frozen=True, kw_only=True)
class NumericAnswer:
    tolerance: float = 0.0
    extract: str | None = None

    def __post_init__(self) -> None:
        _compiled(extract=self.extract)
        if not 0 <= self.tolerance < math.inf:
            raise ValueError("tolerance must be a finite number, 0 or more")

    def __call__(self, completions: list[str], answer: list[str]) -> list[float]:
        rewards = []
        for completion, right in zip(completions, answer, strict=True):
            wanted = _last_number(right)
            if wanted is None or not wanted.is_finite():
                raise ValueError(f"the answer {self.answer_fault(right)}")
            number = _last_number(_extract(completion, self.extract) or "")
            room = Decimal(str(self.tolerance)) * (abs(wanted) or 1)
            rewards.append(float(number is not None and abs(number - wanted) <= room))
        return rewards

    def answer_fault(self, answer: str) -> str | None:
        number = _last_number(answer)
        if number is None or not number.is_finite():
            return f"{answer[:QUOTED]!r} holds no finite number"
        first = plain_signs(answer).strip()[0]
        if first != "-" and unicodedata.category(first) == "Pd":
            return f"{answer[:QUOTED]!r} begins with a dash that may be a minus or not; write a minus as -"
        return None


@dataclass(frozen=True, kw_only=True)
class MathAnswer:
    def __call__(self, completions: list[str], answer: list[str]) -> list[float]:
        _, verify = _math_verify()
        rewards = []
        for completion, right in zip(completions, answer, strict=True):
            gold = _right_expression(right)
            if not gold:
                raise ValueError(f"the answer {self.answer_fault(right)}")
            same = " ".join(completion.split()) == " ".join(right.split())
            rewards.append(float(same or verify(gold, _expression(completion, right))))
        return rewards

    def answer_fault(self, answer: str) -> str | None:
        return None if _right_expression(answer) else f"{answer[:QUOTED]!r} is not a mathematical expression"


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    extract: str | None = None
    threshold: float = 0.0  # 0: none
    reads_entries = True  # as rlhf/data/worlds/gym.py writes them; other rewards get their right answers

    def __post_init__(self) -> None:
        _compiled(extract=self.extract)
        require_found((gym.PACKAGE,), "the reward reasoning_gym", "tasks")

    def __call__(self, completions: list[str], answer: list[str]) -> list[float]:
        scores = []
        for completion, entry in zip(completions, answer, strict=True):
            found = _extract(completion, self.extract)
            score = gym.score(entry, None if found is None else found.strip())
            scores.append(float(score >= self.threshold) if self.threshold else score)
        return scores

    def answer_fault(self, answer: str) -> str | None:
        return None if gym.is_entry(answer) else "is not from data.source: reasoning_gym"


@dataclass(frozen=True, kw_only=True)
class Regex:
    pattern: str

    def __post_init__(self) -> None:
        _compiled(pattern=self.pattern)

    def __call__(self, completions: list[str]) -> list[float]:
        search = re.compile(self.pattern).search
        return [float(says_something(completion) and search(completion) is not None) for completion in completions]


@dataclass(frozen=True, kw_only=True)
class Length:
    most: int
    unit: str = "words"

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError("most must be above 0")
        if self.unit not in ("words", "tokens"):
            raise ValueError("unit must be 'words' or 'tokens'")

    def __call__(self, completions: list[str], completion_ids: list[list[int]] | None = None) -> list[float]:
        if self.unit == "tokens":
            if completion_ids is None:
                raise ValueError("no tokens are given")
            sizes = [len(ids) for ids in completion_ids]
        else:
            sizes = [len(words(completion)) for completion in completions]
        return [-min(max(size / self.most - 1, 0.0), 1.0) for size in sizes]


@dataclass(frozen=True, kw_only=True)
class JsonValid:
    keys: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not all(isinstance(key, str) for key in self.keys):
            raise ValueError("keys must be a list of str")

    def __call__(self, completions: list[str]) -> list[float]:
        return [float(self._is_valid(completion)) for completion in completions]

    def _is_valid(self, text: str) -> bool:
        fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", text, re.DOTALL)
        try:
            value = json.loads(fenced[1] if fenced else text, parse_constant=_refused)
        except (ValueError, RecursionError):
            return False
        return not self.keys or (isinstance(value, dict) and all(key in value for key in self.keys))


REWARDS: dict[str, type] = {
    "exact_answer": ExactAnswer,
    "numeric_answer": NumericAnswer,
    "math_answer": MathAnswer,
    "reasoning_gym": ReasoningGym,
    "regex": Regex,
    "length": Length,
    "json_valid": JsonValid,
}


def _compiled(**patterns: str | None) -> None:
    """Raise ValueError for an option that is not a regular expression."""
    for key, pattern in patterns.items():
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{key} is not a valid regular expression ({error})") from None


# -- texts -------------------------------------------------------------------------------------------------------------


def _extract(text: str, pattern: str | None) -> str | None:
    """Return the last match's first group, or the whole match; None where there is no match."""
    if pattern is None:
        return text
    *_, last = [None, *re.finditer(pattern, text)]
    return None if last is None else last[1 if last.re.groups else 0]


def _plain(text: str) -> str:
    """Return a text in the form that exact_answer compares. One of closing marks alone keeps them: "?" is an answer."""
    spaced = normalise(text).casefold()
    plain = spaced.rstrip(CLOSING_MARKS + " ") or spaced
    number = plain_signs(plain)
    return number if NUMBER.fullmatch(number) else plain


def _is_exact(found: str | None, right: str) -> bool:
    return found is not None and _plain(found) == _plain(right) != ""


def _math_verify() -> tuple[Callable[[str], list[Any]], Callable[[Any, Any], bool]]:
    """Return parse and verify of math-verify. Raises RuntimeError where it is not installed."""
    try:
        from math_verify import parse, verify
    except ImportError:
        raise RuntimeError("math_answer needs the package math-verify: pip install 'rlhf-one-gpu[math]'") from None
    return parse, verify


def _right_expression(answer: str) -> list[Any]:
    """Return an answer as math-verify reads it; [] where it is no mathematical expression.

    It reads TeX between marks only, and of `2\\sqrt{3}` nothing but the 2: an answer without marks gets them.
    """
    parse, _ = _math_verify()
    answer = _in_tex(answer)
    bare = _bare(answer)
    if LISTED.fullmatch(bare):
        return parse(f"${bare}$")
    return parse(answer if MARKED.search(answer) else f"${answer}$")


def _bare(answer: str) -> str:
    """Return an answer without the marks by which TeX begins and ends mathematics and sets."""
    return answer.strip(" $").replace("\\{", "{").replace("\\}", "}")


def _in_tex(text: str) -> str:
    """Return a text with the signs and the grouped digits that math-verify misreads as TeX writes them."""
    text = re.sub(r"√(\w+|\([^()]*\))", r"\\sqrt{\1}", plain_signs(text).replace("∞", "\\infty "))
    return re.sub(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", "", text)


def _expression(completion: str, answer: str) -> list[Any]:
    """Return the last expression of a response as math-verify reads it.

    It finds no tuple and no set in plain text. So where the answer is one, the last one of the response is marked. So
    is a response that is bare TeX.
    """
    parse, _ = _math_verify()
    completion, bare = _in_tex(completion).strip(), _bare(_in_tex(answer))
    if MARKED.search(completion):
        return parse(completion)
    if LISTED.fullmatch(bare):
        *_, last = [None, *LISTED.finditer(completion.replace("\\{", "{").replace("\\}", "}"))]
        if last is not None:
            same_kind = (last[0][0], last[0][-1]) == (bare[0], bare[-1])
            return parse(f"${last[0]}$") if same_kind else []
    return parse(f"${completion.rstrip('.')}$" if BARE_TEX.fullmatch(completion) else completion)


def _last_number(text: str) -> Decimal | None:
    """Return the last number of a text with all its digits; infinite or 0 where a float would be."""
    numbers = list(NUMBER.finditer(plain_signs(text)))
    if not numbers:
        return None
    digits = "".join(c for c in numbers[-1][0] if c.isdecimal() or c in "-+.eE")
    number = float(digits)
    return Decimal(digits) if number and math.isfinite(number) else Decimal(number)


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is not valid JSON")
