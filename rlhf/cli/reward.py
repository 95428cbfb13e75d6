"""`rlhf reward`: what reward functions give real answers and junk, before anything is trained on them."""

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean

import click

from rlhf.cli.choice import Choice, chooses_recipe
from rlhf.data import formats
from rlhf.data.corpus import Dialogue
from rlhf.data.rows import Document, Example, PreferencePair, Row
from rlhf.data.source import read_source
from rlhf.data.transcripts import render_hh
from rlhf.data.worlds import gym
from rlhf.errors import UserError
from rlhf.files import cache_root
from rlhf.plan.own_rows import tokenizer_at_hand
from rlhf.recipe import parse_overrides
from rlhf.recipe.schema_online import MODEL_REWARD
from rlhf.stages.online.rewards import RewardFunction, find
from rlhf.terminal import screen
from rlhf.terminal.progress import working
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import number

PROMPTS = 16  # that are tried
ENDLESS = " ".join(["and"] * 400)
JUNK_WINS = 3  # exit code


@click.command()
@click.argument("names", nargs=-1, metavar="[REWARDS]...")
@chooses_recipe
def reward(choice: Choice, names: tuple[str, ...]) -> None:
    """Try reward functions before anything is trained on them.

    REWARDS are named as in a recipe's reward_funcs; without any, those of the recipe are tried. Each is called on the
    answers of the data and on junk that a policy may find first. Exit code 3: junk gets as much as real answers.
    """
    recipe = choice.load().recipe if choice.names_a_recipe else None
    if not recipe and not (names and choice.data):
        raise click.UsageError("name REWARDS with --data FILE, or a recipe with --hw or --recipe")
    online = recipe.online().values() if recipe else ()
    wanted = names or [name for options in online for name in options.reward_funcs]
    functions = [find(name, "REWARDS") for name in dict.fromkeys(wanted) if name != MODEL_REWARD]
    if not functions:
        raise UserError("the recipe names no reward function: name REWARDS, such as my_rewards:polite")
    with working("reading data"):
        if recipe:
            every = read_source(recipe, cache_root() / "reward")
        else:
            settings = formats.settings_of(choice.data, parse_overrides(choice.changes))
            every = formats.read(choice.data, settings)
        tokenizer = tokenizer_at_hand(recipe) if recipe else None
        written = tokenizer.prompt_text if tokenizer else render_hh
    rows = _judged_rows(functions, every.rows)
    answers = [(row, _answers(row)) for row in random.Random(0).sample(rows, min(PROMPTS, len(rows)))]
    means: dict[str, list[float | None]] = {}
    for kind in dict.fromkeys(kind for _, of_row in answers for kind in of_row):
        asked = [(row, of_row[kind]) for row, of_row in answers if kind in of_row]
        given: dict[str, Sequence[object]] = {
            "prompts": [written(row.prompt) for row, _ in asked],
            "messages": [[asdict(message) for message in row.prompt] for row, _ in asked],
            "completions": [text for _, text in asked],
            "answer": [getattr(row, "right_answer", None) for row, _ in asked],
        }
        for column in {column for function in functions for column in function.columns}:
            given[column] = [row.columns.get(column) for row, _ in asked]
        if tokenizer:
            given["completion_ids"] = [tokenizer.hf.encode(text, add_special_tokens=False) for _, text in asked]
        verdicts = [[n for n in function(given) if n is not None] for function in functions]
        means[kind] = [fmean(found) if found else None for found in verdicts]
    table = [(kind, *map(number, row)) for kind, row in means.items()]
    rows_table("means of the rewards", ("answers", *(f.name for f in functions)), table, numbers=True)
    won = [_junk_wins(f.name, {kind: row[i] for kind, row in means.items()}) for i, f in enumerate(functions)]
    sys.exit(JUNK_WINS if any(won) else 0)


def _judged_rows(functions: Sequence[RewardFunction], every: Sequence[Row]) -> list[Dialogue]:
    """Return the rows that the functions can judge: those with an answer, where one compares with it.

    Raises UserError where there is none, and for a column that a function needs and no row has.
    """
    rows = [row for row in every if not isinstance(row, Document)]
    for function in functions:
        for column in function.needs:
            if not any(column in row.columns for row in rows):
                raise UserError(f"reward {function.name} takes a column {column!r}, which no row of the data has")
    if any(function.needs_answer for function in functions):
        rows = [row for row in rows if getattr(row, "right_answer", None) is not None]
    if not rows:
        raise UserError('no row of the data has a "prompt", with an "answer" for rewards that compare with one')
    return rows


def _answers(row: Dialogue) -> dict[str, str]:
    """Return the real answers to a row's prompt by kind, the best first, and junk, whose kinds begin with "junk"."""
    found: dict[str, str] = {}
    if isinstance(row, PreferencePair):
        found = {"chosen": row.chosen, "rejected": row.rejected}
    if isinstance(row, Example):
        found["rejected" if row.good is False else "response"] = row.response
    right = getattr(row, "right_answer", None)
    if right is not None and gym.right_answer(right):
        found["right answer"] = gym.right_answer(right)
    return found | {"junk: empty": "", "junk: endless": ENDLESS, "junk: prompt copied": row.prompt[-1].content}


def _junk_wins(name: str, means: dict[str, float | None]) -> bool:
    """Print which junk gets as much as the best real answers. Return whether any does."""
    judged = {kind: mean for kind, mean in means.items() if mean is not None}
    best = max((mean for kind, mean in judged.items() if not kind.startswith("junk")), default=math.inf)
    won = [kind for kind, mean in judged.items() if kind.startswith("junk") and mean >= best]
    if won:
        screen.OUT.print(f"warning: {name} gives {', '.join(won)} as much as the best real answers: a policy finds it")
    return bool(won)
