"""A call of a reward function, in a process of its own: what it is given, how long it may take, what it may return."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.data.rows import Message
from rlhf.errors import UserError
from rlhf.process.guest.host import Guest, GuestError, OutOfTime
from rlhf.stages.online import reward_guest
from rlhf.stages.online.reward_guest import Signature, Target

JsonMessages = Sequence[dict[str, str]]  # of a prompt, each with role and content
QUOTED = 60  # characters of a prompt or a response in a message


def json_messages(prompt: Sequence[Message]) -> JsonMessages:
    """Return a prompt as functions get its messages."""
    return [{"role": message.role, "content": message.content} for message in prompt]


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and how the recipe names it. The function itself is in the guest."""

    name: str
    guest: Guest
    target: Target
    signature: Signature
    timeout: float | None = None  # seconds for a call
    retries: int = 0  # of a call that fails or takes longer

    @property
    def needs_answer(self) -> bool:
        """Return whether the function compares responses with right answers."""
        return self.signature.needs_answer

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[str | None],
        ids: Sequence[list[int]] | None = None,
        seed: int | None = None,
        messages: Sequence[JsonMessages] | None = None,
    ) -> list[float | None]:
        """Return one number for each completion; None where the function has no verdict.

        ids: the tokens of each completion, for a function of `completion_ids`. messages: those of each prompt. seed:
        with which the generators of torch, numpy and Python begin there.
        Raises UserError, one line that names prompt and response, where the function raises or a number is not finite,
        and where it takes longer than its timeout, at every try.
        """
        try:
            numbers, wrong = self._call(prompts, completions, answers, ids, seed, messages)
        except GuestError as error:
            if len(completions) > 1:  # find the one that it cannot do
                for i, prompt in enumerate(prompts):
                    its_ids, asked = ids and [ids[i]], messages and [messages[i]]
                    self([prompt], [completions[i]], [answers[i]], its_ids, seed, asked)
            where = _named(prompts[0], completions[0]) if len(completions) == 1 else f"{len(completions)} responses"
            raise UserError(f"reward {self.name} failed with {error.said}, for {where}") from error
        if wrong is not None and wrong[0] < len(completions):
            where = _named(prompts[wrong[0]], completions[wrong[0]])
            raise UserError(f"reward {self.name} is {wrong[1]}, not a finite number in float32 or None, for {where}")
        if len(numbers) != len(completions):
            counts = f"{len(numbers)} numbers for {len(completions)} responses"
            raise UserError(f"reward {self.name} returned {counts}: return a list with one for each")
        return numbers

    def _call(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[str | None],
        ids: Sequence[list[int]] | None,
        seed: int | None,
        messages: Sequence[JsonMessages] | None,
    ) -> tuple[list[float | None], tuple[int, str] | None]:
        """Return what the guest does, after as many retries as there are. Each try has lists of its own.

        Raises UserError for a function that takes too long.
        """
        lists = {
            "prompts": prompts,
            "messages": messages,
            "completions": completions,
            "completion_ids": ids,
            "answer": answers,
        }
        given = {name: lists[name] for name in self.signature.accepts if lists[name] is not None}
        for left in reversed(range(self.retries + 1)):
            try:
                numbers, wrong = self._ask(reward_guest.numbers, self.timeout, given=given, seed=seed)
                return numbers, wrong
            except OutOfTime:
                if not left:
                    tries = f"{self.retries + 1} tries" if self.retries else "one try"
                    raise UserError(
                        f"reward {self.name} took longer than reward_timeout: {self.timeout:g} s in {tries}, for "
                        f"{len(completions)} responses, the first to {_named(prompts[0], completions[0])}"
                    ) from None
            except GuestError:
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")

    def opened(self, folder: Path | None, timeout: float | None, retries: int, device: str = "cpu") -> "RewardFunction":
        """Return the function as a run uses it, with `timeout` seconds for a call and `retries`.

        One that has `open` is given these and the run's folder, and keeps to them by itself; one that has `load` loads
        its model for the `device`. Raises what these raise.
        """
        if "load" in self.signature.methods:
            self._ask(reward_guest.load_reward, device=device)
            self.guest.keep(reward_guest.load_reward, target=self.target, device=device)
        if "open" not in self.signature.methods:
            return replace(self, timeout=timeout, retries=retries)
        limits = {"folder": None if folder is None else str(folder), "timeout": timeout, "retries": retries}
        self._ask(reward_guest.open_reward, **limits)
        self.guest.keep(reward_guest.open_reward, target=self.target, **limits)
        return self

    def figures(self) -> dict[str, float]:
        """Return what the function counted in this run, for the summary; empty for most."""
        counted: dict[str, float] = self._ask(reward_guest.figures) if "figures" in self.signature.methods else {}
        return counted

    def answer_faults(self, answers: Sequence[str]) -> list[str | None]:
        """Return for each right answer why no response can match it; None where one can, or where nobody knows."""
        if "answer_fault" not in self.signature.methods:
            return [None] * len(answers)
        faults: list[str | None] = self._ask(reward_guest.answer_faults, answers=answers)
        return faults

    def _ask(self, function: Callable[..., object], timeout: float | None = None, /, **arguments: object) -> Any:
        return self.guest.ask(function, timeout, target=self.target, **arguments)


def _named(prompt: str, completion: str) -> str:
    """Return both in words: of a long prompt the end, which has the question, and of a long response the beginning."""
    asked = prompt if len(prompt) <= 2 * QUOTED else f"…{prompt[-2 * QUOTED :]}"
    answered = completion if len(completion) <= QUOTED else f"{completion[:QUOTED]}…"
    return f"the prompt {asked!r} and the response {answered!r}"
