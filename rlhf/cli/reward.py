"""`rlhf reward`: what rewards give real answers and junk, before anything is trained on them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from rlhf.cli.choice import Choice
from rlhf.cli.recipe_options import SET_HELP, chooses_recipe
from rlhf.data import formats
from rlhf.data.corpus import Prompt
from rlhf.data.rows import Row
from rlhf.data.source import read_source
from rlhf.data.transcripts import render_hh
from rlhf.errors import OptionError, UserError
from rlhf.evaluation import score as scoring
from rlhf.evaluation import score_items
from rlhf.plan.own_rows import tokenizer_at_hand
from rlhf.process.guest.host import ended_afterwards
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe import PinnedRecipe, Recipe, StageName
from rlhf.recipe.schema_online import MODEL_REWARD, OnlineOptions
from rlhf.recipe.stages import EVALUATE, ONLINE
from rlhf.run.directory import StageRun
from rlhf.run.parents import ParentMissing
from rlhf.stages.online import reward_functions, reward_trial
from rlhf.stages.online.reward_call import RewardFunction, json_messages
from rlhf.stages.online.reward_trial import Answer, Means, RowWithPrompt, Tried
from rlhf.terminal import counted, excerpt, harmless, say, screen
from rlhf.terminal.progress import working
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import number

SHOWN = 6  # answers of the first table
SHORT = 50  # characters of a text in it
WINS = "*"  # behind a number of junk
JUNK_WINS = 3  # exit code


class Rewards(NamedTuple):
    """Rewards that are added up: their weights by name, and the limits of a call."""

    weights: dict[str, float]
    title: str
    timeout: float | None = None
    retries: int = 0
    summed: bool = True  # False where the reward model's score is normalised before it is added


class Material(NamedTuple):
    """What rewards are tried on."""

    rows: Sequence[RowWithPrompt]
    prompts: list[str]  # as functions get them
    answers: list[Answer]
    tokens: Callable[[str], list[int]] | None  # of a response; None where no tokenizer is at hand


@click.command()
@click.argument("rewards", nargs=-1, metavar="[RUN] [REWARDS]...")
@chooses_recipe(
    data="File with prompts, and with answers if there are any, instead of the recipe's data. May be repeated.",
    changes=SET_HELP,
    hw="Try the rewards of this hardware's recipe, on its data; `rlhf recipes` lists both.",
    out=True,
)
@click.option(
    "--rows",
    type=click.IntRange(min=1, max=1000),
    default=16,
    show_default=True,
    metavar="N",
    help="Number of prompts, drawn from the data.",
)
def reward(choice: Choice, rewards: tuple[str, ...], out: Path, rows: int) -> None:
    """Try rewards before anything is trained on them.

    REWARDS are named as in a recipe's reward_funcs: module:function, or a named reward. Without any, those of the
    recipe are tried, and its reward model once it is trained. Each is called on the answers of the data and on junk:
    empty, endless, repeated, the prompt copied, and more. Exit code 3: junk gets as much as real answers.
    """
    by_recipe = bool(choice.run or choice.hw or choice.directory)
    if not by_recipe and not (rewards and choice.data):
        raise click.UsageError("name REWARDS with --data FILE, or a recipe with --hw or --recipe")
    loaded = choice.load() if by_recipe else None
    groups = [Rewards(dict.fromkeys(rewards, 1.0), "rewards")] if rewards or not loaded else _of_recipe(loaded.recipe)
    names = dict.fromkeys(name for group in groups for name in group.weights)
    if MODEL_REWARD in names and not loaded:
        raise click.UsageError(f"{MODEL_REWARD} is a recipe's reward model: name the recipe, or the run")
    with quiet_libraries(), ended_afterwards():
        found = {name: reward_functions.find(name, groups[0].title) for name in names if name != MODEL_REWARD}
        with working("reading data"):
            run = StageRun(out, loaded, EVALUATE) if loaded else None
            every = read_source(run.loaded.recipe, run.run_directory / "data") if run else formats.read(choice.data)
            material = _material(every.rows, rows, [*found.values()], run)
        models = _by_model(loaded, out, material, alone=not found) if loaded and MODEL_REWARD in names else []
        tried = [(group, _tried(group, found, models, material)) for group in groups]
        won = [_show(group, results, material) for group, results in tried if results]
    sys.exit(JUNK_WINS if any(won) else 0)


def _of_recipe(recipe: Recipe) -> list[Rewards]:
    """Return the rewards of a recipe's stages, those that several stages share once. Raises OptionError for none."""
    groups: dict[str, tuple[OnlineOptions, list[StageName]]] = {}
    for stage, options in recipe.online().items():
        key = repr((options.reward_funcs, options.weights, options.reward_timeout, options.reward_retries))
        groups.setdefault(key, (options, []))[1].append(stage)
    if not groups:
        raise OptionError(f"the recipe has none of {', '.join(ONLINE)}, which rewards are for: name REWARDS")
    return [
        Rewards(
            dict(zip(options.reward_funcs, options.weights, strict=True)),
            f"{', '.join(stages)}.reward_funcs",
            options.reward_timeout,
            options.reward_retries,
            not options.normalize_scores,
        )
        for options, stages in groups.values()
    ]


def _material(rows: Sequence[Row], count: int, functions: Sequence[RewardFunction], run: StageRun | None) -> Material:
    """Return what to try rewards on. Raises UserError where the data have nothing of that kind."""
    needing = [function.name for function in functions if function.needs_answer]
    drawn = reward_trial.drawn(rows, count, bool(needing))
    if not drawn:
        what = f'a right answer ({{"prompt", "answer"}}), which {needing[0]} compares with' if needing else "a prompt"
        raise UserError(f"no row of the data has {what}")
    tokenizer = tokenizer_at_hand(run.loaded.recipe) if run else None
    if tokenizer is None and any("completion_ids" in function.signature.accepts for function in functions):
        say("no tokenizer is at hand: rewards get no completion_ids; name a recipe whose model is on this machine")
    is_hh = run is not None and run.loaded.recipe.tokenizer.template == "hh"
    written = tokenizer.prompt_text if tokenizer else render_hh if is_hh else _plain

    def tokens(text: str) -> list[int]:
        assert tokenizer is not None
        return [*tokenizer.hf.encode(text, add_special_tokens=False), tokenizer.eos_id]

    prompts = [written(row.prompt) for row in drawn]
    return Material(drawn, prompts, reward_trial.answers_to(drawn), tokens if tokenizer else None)


def _plain(prompt: Prompt) -> str:
    """Return a prompt without a template: what the user says, or a conversation as a transcript."""
    return prompt[0].content if len(prompt) == 1 else render_hh(prompt)


def _by_model(loaded: PinnedRecipe, out: Path, material: Material, alone: bool) -> list[Tried]:
    """Return what the trained reward model of a run gives; nothing, which is said, where none is trained.

    Raises ParentMissing then, if it is the reward `alone`.
    """
    try:
        stages = scoring.finished_stages(loaded, out)
    except ParentMissing as error:
        if alone:
            raise
        say(f"{MODEL_REWARD} is left out: {error.lines[0]}")
        return []
    items = [
        score_items.Item("", material.rows[answer.row].prompt, {"response": answer.text}, {})
        for answer in material.answers
    ]
    with working("loading the reward model, and scoring"):
        scored, _ = scoring.RewardModel(stages).score(items)
    return [Tried(MODEL_REWARD, [item.scores["response"] for item in scored])]


def _tried(
    group: Rewards, found: Mapping[str, RewardFunction], models: Sequence[Tried], material: Material
) -> list[Tried]:
    """Return what each reward of a group gives each answer, and their sum where there are several."""
    right_answers = [reward_trial.right_answer(row) for row in material.rows]
    messages = [json_messages(row.prompt) for row in material.rows]
    results = [model for model in models if model.name in group.weights]
    for name in group.weights:
        if name == MODEL_REWARD:
            continue
        with working(f"calling {name}"):
            function = found[name].opened(None, group.timeout, group.retries)
            results.append(
                reward_trial.tried(
                    function, material.prompts, right_answers, material.answers, material.tokens, messages
                )
            )
    if len(results) == len(group.weights) > 1 and (group.summed or MODEL_REWARD not in group.weights):
        results.append(reward_trial.total(results, group.weights))
    return results


def _show(group: Rewards, results: Sequence[Tried], material: Material) -> bool:
    """Print what rewards give. Return whether junk gets as much as real answers, of the sum if there is one."""
    names = [result.name for result in results]
    shown = [i for i, answer in enumerate(material.answers) if not answer.junk and answer.row < SHOWN]
    if shown:
        title = f"{group.title}: some answers of the data"
        rows_table(title, ("prompt", "kind", "answer", *names), [_row(material, i, results) for i in shown])
    every = [reward_trial.means(result, material.answers) for result in results]
    title = f"{group.title}: means over {counted(len(material.rows), 'prompt')} of the data"
    lines = [(kind, *(_cell(kind, means) for means in every)) for kind in every[0].by_kind]
    rows_table(title, ("answers", *names), lines, numbers=True)
    if any(means.winning for means in every):
        screen.OUT.print(f"{WINS}: as much as the best real answers get, or more", style="dim")
    for result in results:
        if result.responses:
            screen.OUT.print(
                f"{result.name}: its longest call took {number(result.seconds)} s for "
                f"{counted(result.responses, 'response')} ({result.slowest})",
                style="dim",
            )
    return _verdict(results, every)


def _row(material: Material, index: int, results: Sequence[Tried]) -> list[str]:
    """Return the row of one answer: prompt, kind, text, and what each reward gives."""
    answer = material.answers[index]
    prompt = material.rows[answer.row].prompt[-1].content
    return [_short(prompt), answer.kind, _short(answer.text), *(number(result.numbers[index]) for result in results)]


def _cell(kind: str, means: Means) -> str:
    """Return the mean of a reward over answers of a kind, with a mark where they are junk that wins."""
    mean = means.by_kind[kind]
    return "no verdict" if mean is None else number(mean) + (WINS if kind in means.winning else "")


def _short(text: str) -> str:
    return excerpt(harmless(text), SHORT)


def _verdict(results: Sequence[Tried], every: Sequence[Means]) -> bool:
    """Print which junk wins, of the sum if there is one. Return whether any does."""
    judged = [*zip(results, every, strict=True)][-1 if results and results[-1].name == reward_trial.SUM else 0 :]
    winners = [(result.name, means) for result, means in judged if means.winning]
    for name, means in winners:
        screen.OUT.print(
            f"warning: {name} gives junk as much as real answers ({number(means.best)}): {', '.join(means.winning)}. A "
            "policy will find it: add a reward of the content, or make this one refuse it (docs/rewards.md)"
        )
    if any(means.best is None for _, means in judged):
        screen.OUT.print("it has a verdict on none of the data's answers: compare the rows yourself")
    elif not winners:
        screen.OUT.print("no junk gets as much as the real answers")
    return bool(winners)
