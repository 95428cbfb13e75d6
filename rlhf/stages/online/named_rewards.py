"""The named rewards of texts: each is called with its options, and returns the reward function.

    exact_answer                      1 if it is the answer; case, white space and . , ; : ! ? at the end do not count
    numeric_answer(tolerance=0.01)    1 if its last number is the answer, within a relative tolerance
    math_answer                       1 if its last mathematical expression equals the answer (needs the extra `math`)
    reasoning_gym(threshold=1)        the score of the task's verifier; with `threshold`, 1 if it is at least that
    regex(pattern='^Yes')             1 if the pattern is found
    length(most=60)                   0 up to `most` words, then falling to -1 at twice as many; or `unit='tokens'`

`exact_answer`, `numeric_answer` and `reasoning_gym` take `extract='#### (.*)'`: a pattern whose last match holds what
is compared. A right answer that no response can match raises ValueError. So do options that cannot be used.
"""

import math
import re
from collections.abc import Callable
from decimal import Decimal

from rlhf.data.normal import normalise, plain_signs, says_something, words
from rlhf.data.worlds import gym
from rlhf.packages import install_command, require

RewardFn = Callable[..., list[float]]
QUOTED = 60  # characters of an answer in a message
# 7, 1,234.50, .5, -1e3, -$5. A minus after a word or a closing bracket is not a sign (10-5, f(x)-5), and a point after
# a word or another point does not begin a number (v1.2.5). A comma groups three digits, or separates two numbers.
NUMBER = re.compile(
    r"(?:(?<![\w)\]}])-\$?)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d+)?"
)
CLOSING_MARKS = ".,;:!?。"  # which exact_answer ignores at the end


def exact_answer(*, extract: str | None = None) -> RewardFn:
    extracted = _extractor(extract)

    def is_right(completion: str, answer: str) -> bool:
        if not _plain(answer):
            raise ValueError("the answer is empty")
        return _plain(extracted(completion)) == _plain(answer)

    return _each(is_right)


def numeric_answer(*, tolerance: float = 0.0, extract: str | None = None) -> RewardFn:
    extracted = _extractor(extract)
    if not 0 <= tolerance < math.inf:
        raise ValueError("tolerance must be a finite number, 0 or more")

    def is_right(completion: str, answer: str) -> bool:
        wanted, number = _last_number(answer), _last_number(extracted(completion))
        if wanted is None or not wanted.is_finite():
            raise ValueError(f"the answer {answer[:QUOTED]!r} holds no finite number")
        room = Decimal(str(tolerance)) * (abs(wanted) or 1)
        return number is not None and abs(number - wanted) <= room

    return _each(is_right)


def math_answer() -> RewardFn:
    require(["math_verify"], "the reward math_answer", install_command("math"))

    def is_right(completion: str, answer: str) -> bool:
        from math_verify import parse, verify

        wanted = parse(_marked(answer))
        if not wanted:
            raise ValueError(f"the answer {answer[:QUOTED]!r} is not a mathematical expression")
        return bool(verify(wanted, parse(completion)))

    return _each(is_right)


def reasoning_gym(*, extract: str | None = None, threshold: float = 0.0) -> RewardFn:
    require([gym.PACKAGE], "the reward reasoning_gym", install_command("tasks"))
    extracted = _extractor(extract)

    def reward(completions: list[str], entry: list[str]) -> list[float]:
        """Read whole entries, as rlhf/data/worlds/gym.py writes them; other rewards get their right answers."""
        if not all(map(gym.is_entry, entry)):
            raise ValueError("the answer is not from data.source: reasoning_gym")
        pairs = zip(completions, entry, strict=True)
        scores = [gym.score(task, extracted(completion).strip()) for completion, task in pairs]
        return [float(score >= threshold) for score in scores] if threshold else scores

    return reward


def regex(*, pattern: str) -> RewardFn:
    compiled = _compiled("pattern", pattern)

    def reward(completions: list[str]) -> list[float]:
        return [float(says_something(text) and compiled.search(text) is not None) for text in completions]

    return reward


def length(*, most: int, unit: str = "words") -> RewardFn:
    if most < 1 or unit not in ("words", "tokens"):
        raise ValueError("most must be above 0, and unit 'words' or 'tokens'")

    def reward(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
        counted = completion_ids if unit == "tokens" else map(words, completions)
        return [-min(max(len(parts) / most - 1, 0.0), 1.0) for parts in counted]

    return reward


def _each(is_right: Callable[[str, str], bool]) -> RewardFn:
    """Return the reward that is 1 for a response of which `is_right(response, right answer)` is true, else 0."""

    def reward(completions: list[str], answer: list[str]) -> list[float]:
        return [float(is_right(*pair)) for pair in zip(completions, answer, strict=True)]

    return reward


def _compiled(option: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{option} is not a valid regular expression ({error})") from None


def _extractor(pattern: str | None) -> Callable[[str], str]:
    """Return a function that takes of a text the last match's first group, or the whole match; "" without a match."""
    if pattern is None:
        return str
    compiled = _compiled("extract", pattern)

    def extracted(text: str) -> str:
        found = [match[1 if compiled.groups else 0] for match in compiled.finditer(text)]
        return found[-1] or "" if found else ""

    return extracted


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
