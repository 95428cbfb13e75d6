"""What a guest does for the rewards (rlhf/process/guest): it finds functions, calls them and checks their numbers.

The process that trains imports none of the user's modules; it asks for these functions by their names. A reward is
written down as a `Target`, so that a new guest finds it again.
"""

import functools
import inspect
import json
import math
import operator
import os
import random
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.data.worlds import gym
from rlhf.process.guest import beside

if TYPE_CHECKING:
    import asyncio

Numbers = Sequence[float | None]
Function = Callable[..., Numbers | Awaitable[Numbers]]
REWARD_ARGUMENTS = ("prompts", "messages", "completions", "completion_ids", "answer")
EXTRAS = ("open", "load", "figures", "answer_fault")  # which a reward may have, and most have not
LARGEST = 3.4e38  # finite in float32


class Target(NamedTuple):
    """Where a reward is: a module, a function or a class in it, and the options of the class."""

    module: str
    attribute: str
    options: dict[str, Any]  # of a class


class Signature(NamedTuple):
    """What the host has to know of a reward."""

    accepts: Sequence[str]  # those of REWARD_ARGUMENTS that it takes
    needs_answer: bool  # whether it takes an answer without a default
    not_given: str | None = None  # an argument without a default that no call gives
    is_class: bool = False
    methods: Sequence[str] = ()  # those of EXTRAS that it has
    instead: Sequence[str] | None = None  # what its module has that can be a reward, where it lacks this one


def signature(function: Function) -> Signature:
    """Return what a function takes, without the arguments of TRL such as `trainer_state`."""
    if isinstance(function, type):
        return Signature((), False, is_class=True)
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepts = [name for name in REWARD_ARGUMENTS if takes_all or name in parameters]
    answer = parameters.get("answer")
    needs_answer = answer is not None and answer.default is answer.empty
    return Signature(
        accepts,
        needs_answer,
        not_given=next(filter(None, map(_not_given, parameters.values())), None),
        methods=[name for name in EXTRAS if hasattr(function, name)],
    )


def _not_given(parameter: inspect.Parameter) -> str | None:
    by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    given = parameter.name in REWARD_ARGUMENTS if by_name else parameter.kind is not parameter.POSITIONAL_ONLY
    return None if given or parameter.default is not parameter.empty else parameter.name


# -- what the host asks for ------------------------------------------------------------------------------------------


def describe(target: Sequence[Any]) -> Signature:
    """Return the `Signature` of the user's function. Raises what its module raises."""
    module = beside.import_module(target[0])
    function = getattr(module, target[1], None)
    return signature(function) if callable(function) else Signature((), False, instead=_possible(module))


def _possible(module: ModuleType) -> list[str]:
    """Return the names of a module's own objects that can be called as rewards; none is called."""
    names = []
    for name, value in vars(module).items():
        with suppress(Exception):  # of an odd object, or a function that has no signature
            own = value.__module__ == module.__name__ or value.__module__.startswith(beside.PREFIX)
            if own and not name.startswith("_") and not isinstance(value, type):
                names += [name] * (signature(value).not_given is None)
    return names


def numbers(
    target: Sequence[Any], given: Mapping[str, list[Any]], seed: int | None
) -> tuple[list[float | None], tuple[int, str] | None]:
    """Return the numbers of a reward for the lists `given`, and index and text of one that is not finite in float32.

    Generators of random numbers begin with `seed`: what a reward draws is the same in a run that is resumed.
    """
    function = _reward(target)
    if seed is not None:
        _seed(seed)
    if "answer" in given and not hasattr(function, "reads_entries"):
        given = {**given, "answer": [None if text is None else gym.right_answer(text) for text in given["answer"]]}
    result = function(**{name: given[name] for name in signature(function).accepts if name in given})
    if inspect.isawaitable(result):
        result = _awaited(result)
    # A number alone; or what has keys, which would be taken for the numbers, or comes in any order.
    if isinstance(result, Mapping | Set) or not isinstance(result, Iterable):
        raise TypeError(f"it returned a {type(result).__name__}, not a list of numbers")
    returned = list(result)
    for index, number in enumerate(returned):
        if number is not None and not _finite(number):
            return [], (index, beside.as_written(repr(number)))
    return [None if number is None else float(number) for number in returned], None


def answer_faults(target: Sequence[Any], answers: Sequence[str]) -> list[str | None]:
    """Return what a reward that has `answer_fault` says of each right answer."""
    function = _reward(target)
    plain = (lambda answer: answer) if hasattr(function, "reads_entries") else gym.right_answer
    return [function.answer_fault(plain(answer)) for answer in answers]


def open_reward(target: Sequence[Any], folder: str | None, timeout: float | None, retries: int) -> None:
    """Let a reward begin a run: where it may keep files, and the limits of a call, to which it keeps by itself."""
    _reward(target).open(None if folder is None else Path(folder), timeout, retries)


def load_reward(target: Sequence[Any], device: str) -> None:
    """Let a reward that is a model load it, to compute on the stage's device."""
    _reward(target).load(device)


def figures(target: Sequence[Any]) -> dict[str, float]:
    """Return the figures of a reward that has them."""
    counted: dict[str, float] = _reward(target).figures()
    return counted


def settle(threads: int, deterministic: bool, warn_only: bool) -> None:
    """Compute as the host does. Import torch and numpy, so that a function that imports them later computes so too."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of further processes
    import numpy  # noqa: F401
    import torch

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # stubs lack it


# -- how ---------------------------------------------------------------------------------------------------------------


_rewards: dict[str, Any] = {}  # by target: a reward keeps its state


def _reward(target: Sequence[Any]) -> Any:
    """Return a reward: the user's function, or what a class of this project's makes of the options."""
    key = json.dumps(target)
    if key not in _rewards:
        module, attribute, options = target
        found = getattr(beside.import_module(module), attribute)
        _rewards[key] = found(**options) if isinstance(found, type) else found
    return _rewards[key]


def _seed(seed: int) -> None:
    random.seed(seed)
    for name, seed_all in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if (module := sys.modules.get(name)) is not None:  # else there is nothing to seed
            operator.attrgetter(seed_all)(module)(seed)


@functools.cache
def _loop() -> "asyncio.AbstractEventLoop":
    """Return the one event loop: a client or a semaphore that a function keeps belongs to it."""
    import asyncio  # few rewards need it, and it would slow the start

    return asyncio.new_event_loop()


def _awaited(result: Awaitable[Numbers]) -> Numbers:
    """Return what a function of `async` gives. Its task is cancelled where it fails or is interrupted."""

    async def numbers() -> Numbers:
        return await result

    loop = _loop()
    task = loop.create_task(numbers())
    try:
        return loop.run_until_complete(task)
    finally:
        if not task.done():
            task.cancel()
            with suppress(BaseException):  # of the task's own, as it ends
                loop.run_until_complete(task)


def _finite(number: Any) -> bool:
    """Return whether a number is finite in float32 too, in which rewards are added and weighted."""
    try:
        return math.isfinite(number) and abs(number) <= LARGEST
    except (TypeError, OverflowError):
        return False
