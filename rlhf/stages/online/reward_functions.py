"""Finds rewards that functions give, by the names in a recipe's `reward_funcs`.

`regex(pattern='^Yes')` is a named reward with options: a row of REWARDS in named_rewards.py, judge_reward.py or
model_reward.py, whose class raises ValueError for options that it cannot use. `my_rewards:polite` is the function
`polite` of my_rewards.py in the current folder. A function is called with lists, by keyword, of those among `prompts`,
`messages`, `completions`, `completion_ids` and `answer` that it names (or of all of them, with `**`), and returns one
finite number for each completion, or None for no verdict, as TRL's reward functions do. It may be `async`. An object
may also have `open(folder, timeout, retries)`, `load(device)`, `figures()` and `answer_fault(answer)`;
rlhf/stages/online/reward_call.py says what for.
"""

import ast
import difflib
import inspect
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.process.guest.host import GuestError, guest_of
from rlhf.stages.online import judge_reward, model_reward, named_rewards, reward_guest
from rlhf.stages.online.reward_call import RewardFunction
from rlhf.stages.online.reward_guest import REWARD_ARGUMENTS, Signature, Target, signature

REGISTRY: dict[str, type] = named_rewards.REWARDS | judge_reward.REWARDS | model_reward.REWARDS
MOST_NAMED = 8  # functions of a module, in the message about one that it lacks
# What named rewards count in a run, with titles for the report.
FIGURE_TITLES: dict[str, str] = judge_reward.FIGURES | model_reward.FIGURES


def labels(names: Sequence[str]) -> list[str]:
    """Return a short name of each reward for metrics: `regex`, `my_rewards.polite`; a second `regex` is `regex_2`."""
    short = [re.sub(r"[^\w.]+", ".", name.partition("(")[0].strip()) for name in names]
    return [name if (n := short[:i].count(name)) == 0 else f"{name}_{n + 1}" for i, name in enumerate(short)]


def find(name: str, where: str) -> RewardFunction:
    """Return the reward that a recipe names. Raises UserError, which begins with `where`, when there is none."""
    if file := re.fullmatch(r"(?:.*/)?(\w[\w-]*)\.py:(\w+)", name):
        module, attribute = file.groups()
        raise UserError(
            f"{where}: {name}: name the module, not its file: {module}:{attribute}, "
            f"with {module}.py in the folder that you start from"
        )
    if ":" in name and re.fullmatch(r"[\w.]+:\w+", name):
        return _users_own(name, where)
    return _registered(name, where)


def _registered(name: str, where: str) -> RewardFunction:
    """Return the function of a named reward with its options: `regex(pattern='^Yes')`. Nothing is evaluated."""
    known = f"known are model, {', '.join(REGISTRY)} and module:function"
    try:
        call = ast.parse(name, mode="eval").body
        if isinstance(call, ast.Name):
            call = ast.Call(call, [], [])
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        options = {_option_name(keyword): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(f"{where}: {name!r} is not a reward; write it as regex(pattern='^Yes'); {known}") from None
    kind = REGISTRY.get(call.func.id)
    if kind is None:
        alike = difflib.get_close_matches(call.func.id, REGISTRY, 1, 0.5)
        nearest = f"nearest: {alike[0]}; " if alike else ""
        raise UserError(f"{where}: no reward {call.func.id!r}; {nearest}{known}")
    given = [keyword.arg for keyword in call.keywords]
    twice = next((key for key in options if given.count(key) > 1), None)
    fault = f"option {twice} is given twice" if twice else _fault(kind, options)
    if fault:
        raise UserError(f"{where}: {name}: {fault}")
    try:
        made = kind(**options)
    except ValueError as error:
        raise UserError(f"{where}: {name}: {error}") from None
    return RewardFunction(name, guest_of(None), Target(kind.__module__, kind.__name__, options), signature(made))


def _option_name(keyword: ast.keyword) -> str:
    if keyword.arg is None:  # **{...}
        raise ValueError
    return keyword.arg


LITERALS: dict[object, tuple[type, ...]] = {  # by the annotation of an option: what a recipe may write
    str: (str,),
    str | None: (str,),
    float: (int, float),
    int: (int,),
    int | None: (int,),
    Sequence[str]: (list, tuple),
}


def _fault(kind: type, options: dict[str, Any]) -> str | None:
    """Return what is wrong with the options of a named reward; None where nothing is."""
    parameters = {n: p for n, p in inspect.signature(kind).parameters.items() if p.kind is p.KEYWORD_ONLY}
    for key, value in options.items():
        if key not in parameters:
            return f"no option {key!r}; it has {', '.join(parameters) or 'none'}"
        kinds = LITERALS[parameters[key].annotation]
        if not isinstance(value, kinds) or isinstance(value, bool):
            return f"{key} must be {' or '.join(kind.__name__ for kind in kinds)}"
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in options]
    return f"option {missing[0]} is missing" if missing else None


def _users_own(name: str, where: str) -> RewardFunction:
    """Return the user's own function, of a module beside which the command is started or of an installed one."""
    module, _, attribute = name.partition(":")
    folder = os.getcwd()
    guest, target = guest_of(folder), Target(module, attribute, {})
    try:
        found = Signature(*guest.ask(reward_guest.describe, target=target))
    except GuestError as error:
        beside = [file.stem for file in Path(folder).glob("*.py")]
        alike = [] if module in beside else difflib.get_close_matches(module, beside, 1)
        hint = f", where {alike[0]} is" if alike else ""
        raise UserError(
            f"{where}: {name} cannot be used ({error.said}); modules are looked for in {folder} first{hint}"
        ) from error
    if found.instead is not None:
        raise UserError(f"{where}: {name}: {module} has no function {attribute}; {_others(attribute, found.instead)}")
    if found.is_class:
        raise UserError(f"{where}: {name} is a class; name a function, or an object that can be called")
    if found.not_given is not None:
        raise UserError(
            f"{where}: {name} needs the argument {found.not_given[:40]!r}; a reward function is given "
            f"{', '.join(REWARD_ARGUMENTS)}, each by its name (docs/rewards.md)"
        )
    guest.keep(reward_guest.describe, target=target)  # imports the module, also where a process takes another's place
    return RewardFunction(name, guest, target, found)


def _others(name: str, functions: Sequence[str]) -> str:
    """Return in words which functions a module has instead of the one of this name."""
    if not functions:
        return "it has none that can be a reward (docs/rewards.md)"
    alike = difflib.get_close_matches(name, functions, 1, 0.4)  # `g` for `good`
    nearest = f"nearest: {alike[0]}; " if alike else ""
    more = f" and {len(functions) - MOST_NAMED} more" if len(functions) > MOST_NAMED else ""
    return f"{nearest}it has {', '.join(functions[:MOST_NAMED])}{more}"
