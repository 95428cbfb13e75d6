"""A call of a reward function: what it is given, how long it may take, and what it may return."""

import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from rlhf.errors import UserError
from rlhf.terminal import excerpt

Numbers = Sequence[float | None]
Function = Callable[..., Numbers | Awaitable[Numbers]]
REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "answer")
FAILURES = (Exception, SystemExit)  # of code of the user's own, which may call sys.exit
LARGEST = 3.4e38  # finite in float32
QUOTED = 60  # characters of a prompt or a response in a message


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and how the recipe names it."""

    name: str
    function: Function
    needs_answer: bool
    answer_fault: Callable[[str], str | None] | None = None  # why no response can match a right answer; None: it can
    timeout: float | None = None  # seconds for a call
    retries: int = 0  # of a call that fails or takes longer

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[str | None],
        ids: Sequence[list[int]] | None = None,
    ) -> list[float | None]:
        """Return one number for each completion; None where the function has no verdict.

        ids: the tokens of each completion, for a function of `completion_ids`.
        Raises UserError, one line that names prompt and response, where the function raises or a number is not finite,
        and where it takes longer than its timeout, at every try.
        """
        try:
            numbers = self._call(prompts, completions, answers, ids)
        except UserError:
            raise
        except FAILURES as error:
            if len(completions) > 1:  # find the one that it cannot do
                for i, prompt in enumerate(prompts):
                    self([prompt], [completions[i]], [answers[i]], None if ids is None else [ids[i]])
            where = _named(prompts[0], completions[0]) if len(completions) == 1 else f"{len(completions)} responses"
            reason = excerpt(f"{type(error).__name__}: {error}")
            raise UserError(f"reward {self.name} failed with {reason}, for {where}") from error
        if len(numbers) != len(completions):
            raise UserError(f"reward {self.name} returned {len(numbers)} numbers for {len(completions)} responses")
        for number, prompt, completion in zip(numbers, prompts, completions, strict=True):
            if number is not None and not _finite(number):
                where = _named(prompt, completion)
                raise UserError(f"reward {self.name} is {number!r}, not a finite number in float32, for {where}")
        return [None if number is None else float(number) for number in numbers]

    def _call(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[str | None],
        ids: Sequence[list[int]] | None,
    ) -> Numbers:
        """Return the function's numbers, after as many retries as it has. Raises UserError for one that hangs."""
        given = {"prompts": prompts, "completions": completions, "completion_ids": ids, "answer": answers}
        lists = {name: list(rows) for name, rows in given.items() if rows is not None}
        arguments = {name: lists[name] for name in accepted(self.function) if name in lists}

        def numbers() -> Numbers:
            result = self.function(**arguments)
            if isinstance(result, Awaitable):
                import asyncio  # few rewards need it, and it would slow every command's start

                result = asyncio.run(_awaited(result))
            if isinstance(result, Mapping | Set):  # whose keys would be taken for the numbers, or in any order
                raise TypeError(f"it returned a {type(result).__name__}, not a list of numbers")
            return list(result)

        for left in reversed(range(self.retries + 1)):
            try:
                return numbers() if self.timeout is None else within(self.timeout, numbers)
            except OutOfTime:
                if not left:
                    tries = f"{self.retries + 1} tries" if self.retries else "one try"
                    raise UserError(
                        f"reward {self.name} took longer than reward_timeout: {self.timeout:g} s in {tries}, for "
                        f"{len(completions)} responses, the first to {_named(prompts[0], completions[0])}"
                    ) from None
            except FAILURES:
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")


def accepted(function: Function) -> list[str]:
    """Return the names of the arguments that a function takes, without those of TRL such as `trainer_state`."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return list(REWARD_ARGUMENTS)
    return [name for name in REWARD_ARGUMENTS if name in parameters]


def not_given(function: Function) -> str | None:
    """Return an argument without a default that a function needs and is not given by its name; None where all are."""
    for name, parameter in inspect.signature(function).parameters.items():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        given = name in REWARD_ARGUMENTS if by_name else parameter.kind is not parameter.POSITIONAL_ONLY
        if not given and parameter.default is parameter.empty:
            return name
    return None


class OutOfTime(Exception):
    """A call took longer than it may."""


def within(seconds: float, call: Callable[[], Numbers]) -> Numbers:
    """Return what `call` returns. Raises OutOfTime if that takes longer, and leaves it to its thread.

    The thread ends with the program: nothing in Python can end it before.
    """
    results: list[Numbers] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise OutOfTime
    return results[0]


async def _awaited(numbers: Awaitable[Numbers]) -> Numbers:
    return await numbers


def _finite(number: Any) -> bool:
    """Return whether a number is finite in float32 too, in which rewards are added and weighted."""
    try:
        return math.isfinite(number) and abs(number) <= LARGEST
    except (TypeError, OverflowError):
        return False


def _named(prompt: str, completion: str) -> str:
    short = (text if len(text) <= QUOTED else f"{text[:QUOTED]}…" for text in (prompt, completion))
    return "the prompt {!r} and the response {!r}".format(*short)
