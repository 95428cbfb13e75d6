"""The named rewards of texts. Each is a class of its options, whose instance is the reward function.

    exact_answer                      1 if it is the answer; case, white space and . , ; : ! ? at the end do not count
    numeric_answer(tolerance=0.01)    1 if its last number is the answer, within a relative tolerance
    math_answer                       1 if its last mathematical expression equals the answer (needs the extra `math`)
    reasoning_gym(threshold=1)        the score of the task's verifier; with `threshold`, 1 if it is at least that
    regex(pattern='^Yes')             1 if the pattern is found
    length(most=60)                   0 up to `most` words, then falling to -1 at twice as many; or `unit='tokens'`
    json_valid(keys=['name'])         1 if it is JSON; with `keys`, if it is an object that has them

`exact_answer`, `numeric_answer` and `reasoning_gym` take `extract='#### (.*)'`: a pattern whose last match holds what
is compared.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from rlhf.data.normal import normalise, plain_signs, says_something, words
from rlhf.data.worlds import gym
from rlhf.packages import install_command, require

QUOTED = 60  # characters of an answer in a message
# 7, 1,234.50, .5, -1e3, -$5. A minus after a word or a closing bracket is not a sign (10-5, f(x)-5), and a point after
# a word or another point does not begin a number (v1.2.5). A comma groups three digits, or separates two numbers.
NUMBER = re.compile(
    r"(?:(?<![\w)\]}])-\$?)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d+)?"
)
CLOSING_MARKS = ".,;:!?。"  # which exact_answer ignores at the end


@dataclass(frozen=True, kw_only=True)
class ExactAnswer:
    extract: str | None = None

    def __post_init__(self) -> None:
        _check_pattern("extract", self.extract or "")

    def __call__(self, completions: list[str], answer: list[str]) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [float(_plain(_extract(completion, self.extract)) == _plain(right) != "") for completion, right in pairs]

    def answer_fault(self, answer: str) -> str | None:
        return None if _plain(answer) else "is empty"


@dataclass(frozen=True, kw_only=True)
class NumericAnswer:
    tolerance: float = 0.0
    extract: str | None = None

    def __post_init__(self) -> None:
        _check_pattern("extract", self.extract or "")
        if not 0 <= self.tolerance < math.inf:
            raise ValueError("tolerance must be a finite number, 0 or more")

    def __call__(self, completions: list[str], answer: list[str]) -> list[float]:
        rewards = []
        for completion, right in zip(completions, answer, strict=True):
            wanted, number = _last_number(right), _last_number(_extract(completion, self.extract))
            if wanted is None or not wanted.is_finite():
                raise ValueError(f"the answer {self.answer_fault(right)}")
            room = Decimal(str(self.tolerance)) * (abs(wanted) or 1)
            rewards.append(float(number is not None and abs(number - wanted) <= room))
        return rewards

    def answer_fault(self, answer: str) -> str | None:
        number = _last_number(answer)
        return None if number is not None and number.is_finite() else f"{answer[:QUOTED]!r} holds no finite number"


@dataclass(frozen=True, kw_only=True)
class MathAnswer:
    def __post_init__(self) -> None:
        require(["math_verify"], "the reward math_answer", install_command("math"))

    def __call__(self, completions: list[str], answer: list[str]) -> list[float]:
        from math_verify import parse, verify

        pairs = zip(completions, answer, strict=True)
        return [float(verify(parse(_marked(right)), parse(completion))) for completion, right in pairs]

    def answer_fault(self, answer: str) -> str | None:
        from math_verify import parse

        return None if parse(_marked(answer)) else f"{answer[:QUOTED]!r} is not a mathematical expression"


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    extract: str | None = None
    threshold: float = 0.0  # 0: none
    reads_entries = True  # as rlhf/data/worlds/gym.py writes them; other rewards get their right answers

    def __post_init__(self) -> None:
        _check_pattern("extract", self.extract or "")
        require([gym.PACKAGE], "the reward reasoning_gym", install_command("tasks"))

    def __call__(self, completions: list[str], answer: list[str]) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        scores = [gym.score(entry, _extract(completion, self.extract).strip()) for completion, entry in pairs]
        return [float(score >= self.threshold) for score in scores] if self.threshold else scores

    def answer_fault(self, answer: str) -> str | None:
        return None if gym.is_entry(answer) else "is not from data.source: reasoning_gym"


@dataclass(frozen=True, kw_only=True)
class Regex:
    pattern: str

    def __post_init__(self) -> None:
        _check_pattern("pattern", self.pattern)

    def __call__(self, completions: list[str]) -> list[float]:
        return [float(says_something(text) and re.search(self.pattern, text) is not None) for text in completions]


@dataclass(frozen=True, kw_only=True)
class Length:
    most: int
    unit: str = "words"

    def __post_init__(self) -> None:
        if self.most < 1 or self.unit not in ("words", "tokens"):
            raise ValueError("most must be above 0, and unit 'words' or 'tokens'")

    def __call__(self, completions: list[str], completion_ids: list[list[int]]) -> list[float]:
        counted = completion_ids if self.unit == "tokens" else map(words, completions)
        return [-min(max(len(parts) / self.most - 1, 0.0), 1.0) for parts in counted]


@dataclass(frozen=True, kw_only=True)
class JsonValid:
    keys: Sequence[str] = ()

    def __call__(self, completions: list[str]) -> list[float]:
        return [float(self._is_valid(completion)) for completion in completions]

    def _is_valid(self, text: str) -> bool:
        fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", text, re.DOTALL)
        try:
            value = json.loads(fenced[1] if fenced else text, parse_constant=int)  # NaN is no JSON, and no int
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


def _check_pattern(option: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{option} is not a valid regular expression ({error})") from None


def _extract(text: str, pattern: str | None) -> str:
    """Return the last match's first group, or the whole match; "" where there is no match."""
    if pattern is None:
        return text
    found = [match[1 if match.re.groups else 0] for match in re.finditer(pattern, text)]
    return found[-1] or "" if found else ""


def _plain(text: str) -> str:
    """Return a text in the form that exact_answer compares. One of closing marks alone keeps them: "?" is an answer."""
    spaced = normalise(text).casefold()
    plain = spaced.rstrip(CLOSING_MARKS + " ") or spaced
    number = plain_signs(plain)
    return number if NUMBER.fullmatch(number) else plain


def _marked(answer: str) -> str:
    """Return an answer between TeX's marks of mathematics: of a bare `2\\sqrt{3}` nothing but the 2 would be read."""
    return answer if re.search(r"\$|\\\(|\\\[|\\boxed", answer) else f"${answer}$"


def _last_number(text: str) -> Decimal | None:
    """Return the last number of a text with all its digits; infinite or 0 where a float would be."""
    found = NUMBER.findall(plain_signs(text))
    if not found:
        return None
    digits = re.sub(r"[,$]", "", found[-1])
    number = float(digits)
    return Decimal(digits) if number and math.isfinite(number) else Decimal(number)
