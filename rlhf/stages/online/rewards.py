"""Reward functions, which are called in this process, as TRL's are.

    regex(pattern='^Yes')   a row of REWARDS, which makes a function of its options
    my_rewards:polite       the function `polite` of my_rewards.py in the current folder, or of an installed module

A function is called with lists, by keyword: those of STANDARD and of the rows' columns that it names, with `**` all of
STANDARD. It returns one finite number for each completion, None for no verdict. It may be `async`. A judge and a reward
model of others also have `begin(folder, device)`, called once.
"""

import ast
import asyncio
import importlib
import importlib.util
import inspect
import os
import random
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf.data.worlds import gym
from rlhf.errors import UserError
from rlhf.stages.online import named_rewards
from rlhf.stages.online.judge_reward import JudgeReward
from rlhf.stages.online.model_reward import ModelReward
from rlhf.terminal import excerpt

REWARDS: dict[str, Callable[..., Any]] = {
    "exact_answer": named_rewards.exact_answer,
    "numeric_answer": named_rewards.numeric_answer,
    "math_answer": named_rewards.math_answer,
    "reasoning_gym": named_rewards.reasoning_gym,
    "regex": named_rewards.regex,
    "length": named_rewards.length,
    "judge": JudgeReward,
    "reward_model": ModelReward,
}
STANDARD = ("prompts", "messages", "completions", "completion_ids", "answer")
ENTRY = "entry"  # the answer of reasoning-gym, with all that its verifier reads
LARGEST = 3.4e38  # finite in float32, in which rewards are added
RUNNER = asyncio.Runner()  # of one event loop: a client or a semaphore that a function keeps belongs to it
QUOTED = 100  # characters of a prompt or a response in a message
# Ends the process that started it, with a line, unless its input is closed in time. A thread could not: Python's
# regular expressions hold the interpreter, and libraries use the one alarm that a process has.
WATCHDOG = """
import os, select, sys
parent = os.getppid()
if not select.select([0], [], [], float(sys.argv[1]))[0] and os.getppid() == parent:
    print(sys.argv[2], file=sys.stderr, flush=True)
    os.kill(parent, 9)
"""


def labels(names: Sequence[str]) -> list[str]:
    """Return a short name of each reward for metrics: `regex`, `my_rewards.polite`; a second `regex` is `regex_2`."""
    short = [re.sub(r"[^\w.]+", ".", name.partition("(")[0].strip()) for name in names]
    return [name if (n := short[:i].count(name)) == 0 else f"{name}_{n + 1}" for i, name in enumerate(short)]


class RewardFunction:
    """A reward function and how the recipe names it.

    columns: those of the rows that it takes. needs: those without which it cannot judge. needs_answer: whether it
    compares responses with right answers. is_named: whether it is one of REWARDS, which raise for an answer that no
    response can match. begin(folder, device): make it ready for a run, which has a folder for files, and a device.
    weight: in a sum of rewards. timeout: the seconds of a call, past which the process ends in a line.
    """

    weight = 1.0
    timeout: float | None = None

    def __init__(self, name: str, function: Callable[..., Any]):
        self.name, self.function, self.is_named = name, function, ":" not in name
        self.begin: Callable[[Path | None, str], None] = getattr(function, "begin", lambda folder, device: None)
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        needed = {p.name: p.default is p.empty for p in named}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.columns = [name for name in needed if name not in (*STANDARD, ENTRY)]
        self.needs = [name for name in self.columns if needed[name]]
        self.needs_answer = needed.get("answer", False) or needed.get(ENTRY, False)
        self._taken = {*needed, *(STANDARD if takes_all else ())}

    def __call__(self, given: Mapping[str, Sequence[Any]], seed: int = 0) -> list[float | None]:
        """Return one number for each of the completions; None where the function has no verdict.

        given: lists of one item for each completion, `prompts` and `completions` among them. What the function draws
        begins with `seed`.
        Raises UserError, one line that names prompt and response, where the function raises or a number is not finite.
        """
        count = len(given["completions"])
        try:
            return self._call(given, seed)
        except (Exception, SystemExit) as error:  # a user's code raises what it likes
            for row in range(count) if count > 1 else ():  # find the one that it cannot judge
                self({name: items[row : row + 1] for name, items in given.items()}, seed)
            where = _asked(given, 0) if count == 1 else f"{count} responses"
            raise UserError(f"reward {self.name} failed with {_said(error, self.function)}, for {where}") from error

    def _call(self, given: Mapping[str, Sequence[Any]], seed: int) -> list[float | None]:
        count = len(given["completions"])
        line = (
            f"error: reward {self.name} took longer than reward_timeout: {self.timeout} s for {count} responses, the "
            f"first for {_asked(given, 0)}; a stage with a checkpoint goes on with --resume"
        )
        answers = given.get("answer", ())
        plain = [None if answer is None else gym.right_answer(answer) for answer in answers]
        lists = {**given, "answer": plain, ENTRY: answers} if "answer" in given else given
        with _limited(self.timeout, line), _apart(seed):
            result = self.function(**{name: list(items) for name, items in lists.items() if name in self._taken})
            if inspect.iscoroutine(result):
                result = RUNNER.run(result)
            if isinstance(result, Mapping) or not isinstance(result, Iterable):  # of a mapping the keys would be taken
                raise TypeError(f"it returned a {type(result).__name__}, not a list of numbers")
            numbers = list(result)
            for number in numbers:
                if number is not None and (isinstance(number, str) or not abs(number) <= LARGEST):  # NaN is not
                    raise ValueError(f"it returned {number!r}, not a finite number in float32 or None")
            if len(numbers) != count:
                raise ValueError(f"it returned {len(numbers)} numbers for {count} responses, not one for each")
            return [None if number is None else float(number) for number in numbers]


def _asked(given: Mapping[str, Sequence[Any]], row: int) -> str:
    """Return the end of a prompt, which has the question, and the beginning of its response."""
    prompt, response = given["prompts"][row], given["completions"][row]
    return f"the prompt {prompt[-QUOTED:]!r} and the response {response[:QUOTED]!r}"


# -- where a reward is -------------------------------------------------------------------------------------------------


def find(name: str, where: str) -> RewardFunction:
    """Return the reward that a recipe names. Raises UserError, which begins with `where`, when there is none."""
    if re.fullmatch(r"[\w.]+:\w+", name):
        return _users_own(name, where)
    known = f"known are model, {', '.join(REWARDS)} and module:function"
    try:
        call = ast.parse(name, mode="eval").body
        call = ast.Call(call, [], []) if isinstance(call, ast.Name) else call
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise SyntaxError
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        if len(options) < len(call.keywords):
            raise SyntaxError  # an option that is given twice
        kind = REWARDS[call.func.id]
    except (KeyError, SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(f"{where}: {name!r} is not a reward; write it as regex(pattern='^Yes'); {known}") from None
    try:
        return RewardFunction(name, kind(**options))
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {name}: {error}") from None


def _users_own(name: str, where: str) -> RewardFunction:
    """Return a function of the user's own, of a module in the current folder or of an installed one."""
    module, _, attribute = name.partition(":")
    try:
        with _apart(0):
            loaded = _loaded(module)
    except (Exception, SystemExit) as error:  # a user's module raises what it likes
        raise UserError(
            f"{where}: {name}: {module} cannot be imported ({_said(error)}); it is looked for in {os.getcwd()} first"
        ) from error
    function = getattr(loaded, attribute, None)
    if not callable(function) or isinstance(function, type):
        raise UserError(f"{where}: {name}: {module} ({loaded.__file__}) has no function {attribute}")
    return RewardFunction(name, function)


def _loaded(name: str) -> ModuleType:
    """Return a module: the file of this name in the current folder, by its place, or what Python finds by the name.

    A file that is loaded by its place is in `sys.modules` under a name that no library imports, whatever its own.
    """
    file = Path(f"{name}.py").absolute()
    if not file.is_file():
        return importlib.import_module(name)
    private = f"reward:{file}"
    if private in sys.modules:
        return sys.modules[private]
    spec = importlib.util.spec_from_file_location(private, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[private] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- the user's code in this process -----------------------------------------------------------------------------------


@contextmanager
def _apart(seed: int) -> Iterator[None]:
    """Run the user's code in the block: it changes neither what training draws nor the current folder.

    The current folder is the last one on the path there. A fork that comes back ends, for it would train too.
    """
    import numpy as np  # these libraries take seconds, and a recipe's rewards are looked for before them
    import torch

    from rlhf.models.random_state import kept_random_state

    folder, process = os.getcwd(), os.getpid()
    with kept_random_state():
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        sys.path.append(folder)
        try:
            yield
        finally:
            if os.getpid() != process:
                os._exit(1)
            os.chdir(folder)
            if folder in sys.path:
                del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]


@contextmanager
def _limited(seconds: float | None, line: str) -> Iterator[None]:
    """End this process with a line where the block takes longer than so many seconds."""
    if seconds is None:
        yield
        return
    command = [sys.executable, "-I", "-S", "-c", WATCHDOG, str(seconds), line]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):  # its end closes the input
        yield


def _said(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Return an error in one line: class, message, and the innermost line of the function's file, else of all code.

    What is wrong with the numbers that a function returned is said of its first line.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames]
    if inspect.isfunction(function):
        code = inspect.unwrap(function).__code__
        places = [place for place in places if place[0] == code.co_filename]
        places = places or [(code.co_filename, code.co_firstlineno)]
    at = f"{places[-1][0]}:{places[-1][1]}" if places else ""
    if isinstance(error, SyntaxError):
        at = f"{error.filename}:{error.lineno}"
    return excerpt(f"{type(error).__name__}: {error}") + (f" in {at}" if at else "")
