"""`rlhf reward`: what reward functions give real answers and junk, before anything is trained on them."""

import math
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from statistics import fmean

import click

from rlhf.cli.choice import Choice, chooses_recipe
from rlhf.data import formats
from rlhf.data.normal import words
from rlhf.data.rows import Document, Example, PreferencePair, PromptOnly, Row
from rlhf.data.source import read_source
from rlhf.data.transcripts import render_hh
from rlhf.data.worlds import gym
from rlhf.errors import UserError
from rlhf.files import cache_root
from rlhf.plan.own_rows import tokenizer_at_hand
from rlhf.recipe import parse_overrides
from rlhf.recipe.schema_online import MODEL_REWARD
from rlhf.stages.online.rewards import RewardFunction, find, json_messages
from rlhf.terminal import screen
from rlhf.terminal.progress import working
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import number

PROMPTS = 16  # that are tried
LONG = 400  # words of junk that does not end
JUNK_WINS = 3  # exit code
RowWithPrompt = Example | PreferencePair | PromptOnly
Answers = dict[str, list[tuple[RowWithPrompt, str]]]  # by kind: rows and an answer to each


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
        answers = _answers(_drawn(every.rows, functions))
        tokenizer = tokenizer_at_hand(recipe) if recipe else None
        written = tokenizer.prompt_text if tokenizer else render_hh
    means: dict[str, list[float | None]] = {}
    for kind, asked in answers.items():
        given: dict[str, Sequence[object]] = {
            "prompts": [written(row.prompt) for row, _ in asked],
            "messages": [json_messages(row.prompt) for row, _ in asked],
            "completions": [text for _, text in asked],
            "answer": [getattr(row, "right_answer", None) for row, _ in asked],
        }
        for column in {column for function in functions for column in function.columns}:
            given[column] = [row.columns.get(column) for row, _ in asked]
        if tokenizer:
            given["completion_ids"] = [tokenizer.hf.encode(text, add_special_tokens=False) for _, text in asked]
        verdicts = [[n for n in function(given) if n is not None] for function in functions]
        means[kind] = [fmean(found) if found else None for found in verdicts]
    rows = [(kind, *map(number, row)) for kind, row in means.items()]
    rows_table("means of the rewards", ("answers", *(f.name for f in functions)), rows, numbers=True)
    won = [_junk_wins(f.name, {kind: row[i] for kind, row in means.items()}) for i, f in enumerate(functions)]
    sys.exit(JUNK_WINS if any(won) else 0)


def _drawn(rows: Sequence[Row], functions: Sequence[RewardFunction]) -> list[RowWithPrompt]:
    """Return rows with a prompt, and with a right answer where a function needs it. Raises UserError without any."""
    needing = next((function.name for function in functions if function.needs_answer), None)
    usable = [row for row in rows if not isinstance(row, Document)]
    if needing:
        usable = [row for row in usable if getattr(row, "right_answer", None) is not None]
    if not usable:
        what = f'a right answer ({{"prompt", "answer"}}), which {needing} compares with' if needing else "a prompt"
        raise UserError(f"no row of the data has {what}")
    return random.Random(0).sample(usable, min(PROMPTS, len(usable)))


def _answers(rows: Sequence[RowWithPrompt]) -> Answers:
    """Return the real answers to each row's prompt, the best kind first, and junk, whose kinds begin with "junk"."""
    found: Answers = {}
    for row in rows:
        for kind, text in _real(row):
            found.setdefault(kind, []).append((row, text))
    others = [text for kind in islice(found, 1) for _, text in found[kind]] or [""]
    for i, row in enumerate(rows):
        asked = row.prompt[-1].content
        junk = {"empty": "", "endless": " ".join(islice(cycle(words(asked) or ["and"]), LONG)), "prompt copied": asked}
        for kind, text in (junk | {"another's answer": others[(i + 1) % len(others)]}).items():
            found.setdefault(f"junk: {kind}", []).append((row, text))
    return found


def _real(row: RowWithPrompt) -> Iterator[tuple[str, str]]:
    if isinstance(row, PreferencePair):
        yield from (("chosen", row.chosen), ("rejected", row.rejected))
        return
    if isinstance(row, Example):
        yield ("rejected" if row.good is False else "response"), row.response
    if row.right_answer and gym.right_answer(row.right_answer):
        yield "right answer", gym.right_answer(row.right_answer)


def _junk_wins(name: str, means: dict[str, float | None]) -> bool:
    """Print which junk gets as much as the best real answers. Return whether any does."""
    judged = {kind: mean for kind, mean in means.items() if mean is not None}
    best = max((mean for kind, mean in judged.items() if not kind.startswith("junk")), default=math.inf)
    won = [kind for kind, mean in judged.items() if kind.startswith("junk") and mean >= best]
    if won:
        screen.OUT.print(f"warning: {name} gives {', '.join(won)} as much as the best real answers: a policy finds it")
    return bool(won)
