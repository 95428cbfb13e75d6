"""`rlhf new`: a recipe for a model and a card, with the fastest settings that are predicted to fit.

Of a model on the hub only config.json and the tokenizer's files are downloaded. The result is a folder
`<recipes>/<card>-<model>/v1/` with recipe.yaml, README.md and predicted.json, which appears complete or not at all.
"""

import errno
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from peakmem import cards
from rlhf import recipe as recipes
from rlhf.data.formats import ParsedRows
from rlhf.errors import OptionError, UserError
from rlhf.files import sync_tree
from rlhf.new import budget, probe
from rlhf.new.content import Content, initial_content, render
from rlhf.new.data import OwnData, check_data, check_files
from rlhf.new.model import ModelFacts, check_name, describe, read_model
from rlhf.new.options import KNOWN_CARDS, ChosenCard, NewOptions
from rlhf.plan import machine, prediction_file
from rlhf.plan import plan as planning
from rlhf.plan.fit import USABLE, Fit, fit, four_bit_changes, micro_batch
from rlhf.plan.own_rows import OwnRows, read_rows
from rlhf.plan.predict import Predictor, card_needed_bytes
from rlhf.process.libraries import quiet_libraries
from rlhf.process.sizes import size_in_bytes
from rlhf.recipe import Changes, PinnedRecipe, StageName
from rlhf.recipe.base import BaseSpec
from rlhf.recipe.schema_online import MODEL_REWARD
from rlhf.recipe.stages import ONLINE, POLICIES, STAGE_TABLE, TRAINING_STAGES, PolicyName
from rlhf.stages.online import rewards
from rlhf.terminal.progress import Work
from rlhf.terminal.wording import GB

ASKING = 0.2  # of --minutes, at most: a busy machine takes minutes for what else takes seconds
SIZES_GB = (6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 192)  # memory of cards that are sold
Say = Callable[[str], None]


def card_of(text: str) -> ChosenCard:
    """Return what --card names: `cpu`, `4090`, `h100` or a size such as `24GB`. Raises OptionError."""
    if text.lower() == "cpu":
        return ChosenCard("cpu", round(machine.free_bytes() / GB, 2), "free on this machine", machine.threads())
    if reason := cards.lacks_bfloat16(text.lower()):
        raise OptionError(f"--card {text}: {reason}, as a new recipe does")
    if text.lower() in KNOWN_CARDS:
        return KNOWN_CARDS[text.lower()]
    size = size_in_bytes(text)
    if size is None:
        known = ", ".join(name for name in KNOWN_CARDS if not cards.lacks_bfloat16(name))
        raise OptionError(f"--card {text}: name a size with its unit, for example 24GB, or one of {known}, or cpu")
    return ChosenCard(re.sub(r"\s", "", text.lower()), round(size / GB, 2), "as given by --card")


def stages_of(names: Sequence[str]) -> tuple[PolicyName, ...]:
    """Return the stages that --stages names, each once. Raises OptionError for another name, and without a name."""
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        problem = f"{unknown[0]} is none of" if unknown else "name one or several of"
        raise OptionError(f"--stages {','.join(names) or repr('')}: {problem} {', '.join(POLICIES)}")
    return tuple(name for name in dict.fromkeys(names) if name in POLICIES)


def check_rewards(options: NewOptions) -> None:
    """Raise OptionError for rewards that no stage would use, UserError for one that cannot be found."""
    if options.rewards and not set(options.stages) & set(ONLINE):
        raise OptionError(f"--reward is for {', '.join(ONLINE)}: name one of them with --stages")
    for name in options.rewards:
        if name != MODEL_REWARD:
            rewards.find(name, "--reward")


def target_of(recipes_root: Path, options: NewOptions) -> Path:
    """Return the folder of the new recipe. Raises UserError if it exists, OptionError if its name cannot be one."""
    name = options.name or "-".join(filter(None, (options.card.name, _slug(options.model), options.task)))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise OptionError(f"--name {name}: letters, digits, points, hyphens and underscores only")
    target = recipes_root / name / "v1"
    if os.path.lexists(target):
        raise UserError(f"{target} exists already: choose another name with --name, or delete it")
    return target


def _slug(model: str) -> str:
    """Return a model's name as part of a folder's name: `Qwen/Qwen3-8B` is `qwen3-8b`."""
    return (
        re.sub(r"[^a-z0-9._-]+", "-", Path(os.path.abspath(model)).name.lower().removesuffix(".gguf")).strip("-.")
        or "model"
    )


# -- settings that fit -----------------------------------------------------------------------------------------------


def least_memory(loaded: PinnedRecipe, stages: Sequence[StageName]) -> Changes:
    """Return the changes with which stages need the least memory: as few rows at a time as can be, recomputed.

    A step has two rollouts, which is quicker to rehearse than all of them and needs the same.
    """
    changes: Changes = {"evaluate.batch_size": 1}
    for stage in stages:
        if stage in TRAINING_STAGES:
            changes |= {
                f"{stage}.gradient_checkpointing": True,
                **micro_batch(loaded, stage, STAGE_TABLE[stage].least_rows),
            }
        if stage in ONLINE:
            per_prompt = loaded.recipe.online()[stage].samples_per_prompt
            changes |= {f"{stage}.rollout_batch_size": per_prompt, f"{stage}.batch_size": 2 * per_prompt}
            changes[f"{stage}.num_mini_batches"] = 1
    return changes


def search(
    predictor: Predictor, loaded: PinnedRecipe, parameters: int, stages: Sequence[StageName], limit: int, say: Say
) -> Fit:
    """Return the fastest settings with which each of `stages` needs at most `limit` bytes.

    A bfloat16 base (2 bytes a parameter) is tried before one in 4 bits, where it has room. Raises UserError if nothing
    fits, with the smallest card that would.
    """
    four_bit = four_bit_changes(stages)
    if 2 * parameters < limit:
        fitted = fit(predictor.predict, loaded, stages, limit, say)  # tries 4 bits by itself
        if not fitted.too_large:
            return fitted
    elif parameters / 2 < limit:
        fitted = fit(predictor.predict, loaded.with_changes(four_bit), stages, limit, say)
        if not fitted.too_large:
            return fitted._replace(changes=four_bit | fitted.changes)
    on_4bit = loaded.with_changes(four_bit)
    least = on_4bit.with_changes(least_memory(on_4bit, stages))
    needs = {}
    for stage in stages:
        say(f"predicting the least that {stage} needs")
        needs[stage] = card_needed_bytes(predictor.predict(least, stage).whole)
    raise UserError(_too_large(needs, limit))


def search_on_cpu(predictor: Predictor, loaded: PinnedRecipe, stages: Sequence[StageName], limit: int, say: Say) -> Fit:
    """Return the fastest settings with which each stage needs at most `limit` bytes of this machine's memory.

    Raises UserError if nothing fits in float32: products of 4-bit weights and paged optimizers are for a card.
    """
    fitted = fit(predictor.predict, loaded, stages, limit, say, compress=False)
    if fitted.too_large:
        least = loaded.with_changes(least_memory(loaded, stages))
        stage = fitted.too_large[0]
        needs = card_needed_bytes(predictor.predict(least, stage).whole) / GB
        raise UserError(
            f"{limit / GB:.3g} GB, {USABLE:.0%} of what is free on this machine, are too few: {stage} needs "
            f"{needs:.1f} GB even with one row at a time; --max-length makes rows shorter, or choose a smaller model"
        )
    return fitted


def _too_large(needs: Mapping[StageName, int], limit: int) -> str:
    stage = max(needs, key=needs.__getitem__)
    least = needs[stage] / GB
    card = next((size for size in SIZES_GB if USABLE * size >= least), None)
    advice = f"the smallest card that would do has {card} GB" if card else "no card that is sold would do"
    return (
        f"{limit / GB:.3g} GB, {USABLE:.0%} of the card, are too few: {stage} needs {math.ceil(10 * least) / 10:g} GB "
        f"even with a 4-bit base and one row at a time; {advice}. --max-length makes rows shorter"
    )


# -- the folder ------------------------------------------------------------------------------------------------------


class NewRecipe(NamedTuple):
    """A new recipe with what is predicted for it."""

    folder: Path
    loaded: PinnedRecipe
    stages: tuple[StageName, ...]
    fit: Fit
    hours: Mapping[StageName, float]  # projected, of stages that train where their time is known
    rates: cards.Rates | None  # measured, of a CPU
    notes: tuple[str, ...]  # what was found out for this recipe


def check(recipes_root: Path, options: NewOptions) -> tuple[Path, ParsedRows | None]:
    """Return the folder of the new recipe, and the rows of own files. Nothing is downloaded or loaded for it.

    Raises UserError or OptionError for all that can be refused before the model is read.
    """
    check_name(options.model, options.revision)
    check_files(options)
    target = target_of(recipes_root, options)
    if options.minutes is not None and not options.card.is_cpu and cards.rates_of(options.card.name) is None:
        raise OptionError(
            f"--minutes {options.minutes:g}: the speed of {options.card.name} is not known; name a card, such as 4090"
        )
    check_rewards(options)
    return target, check_data(options)


def make(recipes_root: Path, options: NewOptions, predictor: Predictor, say: Work) -> NewRecipe:
    """Return a new recipe, written into the folder of recipes. `say` is told what is being done.

    Raises UserError for a model, data or a card that cannot be used, and if the folder exists. Nothing is left behind
    then, and neither after Ctrl-C. Each refusal comes before all work of more than seconds that it does not need.
    """
    target, rows = check(recipes_root, options)
    with quiet_libraries(), tempfile.TemporaryDirectory(prefix="rlhf-new-") as folder:
        say(f"reading {options.model}")
        model = read_model(options.model, options.revision)
        facts = describe(model, options.template)
        content = initial_content(options, model, facts, rows)
        draft = Path(folder) / target.parent.name / "v1"
        draft.mkdir(parents=True)
        making = _Making(options, predictor, say, draft, facts)
        making.read_own_rows(content)
        if making.asks(content):
            making.refuse_too_few_minutes(content)
            content = making.with_answers(content)
        fitted = making.fitted(content)
        content = making.within_budget(content.with_changed_keys(fitted.changes), fitted)
        loaded = _write_recipe(draft, content)
        say("predicting the whole chain")
        predicted = prediction_file.predicted(predictor, loaded)
        table = prediction_file.needs_table(predicted.needed, options.card.memory_gb)
        readme = render("README.md", content, recipe_name=target.parent.name, folder=target, needs_table=table)
        (draft / "README.md").write_text(readme, encoding="utf-8")
        prediction_file.write(draft, predicted)
        hours = planning.training_hours(loaded, fitted.stages, making.own)
        _place(draft, target)
    return NewRecipe(target, recipes.load(target), making.stages, fitted, hours, making.rates, content.notes)


class _Making:
    """What making a recipe needs all the time: the options, and a folder in which recipes are tried."""

    def __init__(self, options: NewOptions, predictor: Predictor, say: Work, draft: Path, facts: ModelFacts):
        self.options, self.predictor, self.say, self.draft, self.facts = options, predictor, say, draft, facts
        self.stages: tuple[StageName, ...] = (*options.trained, "evaluate")
        self.rates: cards.Rates | None = None  # measured, of a CPU
        self.own: OwnRows | None = None  # the same for all settings that are tried

    def read_own_rows(self, content: Content) -> None:
        """Read the rows of own files as a run divides them. Raises UserError where a stage would have too few."""
        self.own = read_rows(_write_recipe(self.draft, content).recipe, self.stages)
        for stage, lack in self.own.lacking.items() if self.own else ():
            assert isinstance(content.data, OwnData)
            few = f"{content.data.words} are too few for {stage}; add some"
            raise UserError(f"--data {self.options.data[0]}: {few} ({lack})")

    def asks(self, content: Content) -> bool:
        """Return whether the base is asked: a small one that is here, which functions alone will reward."""
        local = content.model.source != "hub" and self.facts.parameters <= probe.LARGEST
        return (
            self.options.card.is_cpu
            and local
            and isinstance(content.data, OwnData)
            and not self.options.has_reward_model
        )

    def fitted(self, content: Content) -> Fit:
        """Return the fastest settings that fit. Raises UserError if none does."""
        loaded, options = _write_recipe(self.draft, content), self.options
        if not options.card.is_cpu:
            limit = options.card.limit
            return search(self.predictor, loaded, self.facts.parameters, self.stages, limit, self.say)
        return search_on_cpu(self.predictor, loaded, self.stages, options.card.limit, self.say)

    def refuse_too_few_minutes(self, content: Content) -> None:
        """Raise UserError where the budget is too small whatever the base answers, before it is asked."""
        assert self.options.budget is not None  # of a CPU there always is one
        short = content._replace(response_length=min(probe.SHORTEST, content.response_length))
        if (least := self._least_minutes(short)) > self.options.budget:
            raise UserError(budget.too_few(self.options.budget, self._least_minutes(content), least))

    def _least_minutes(self, content: Content) -> float:
        fitted = self.fitted(content)
        return budget.least(content.with_changed_keys(fitted.changes), self._times(fitted))

    def with_answers(self, content: Content) -> Content:
        """Return the content with responses as long as the base needs, and what it answered as a note."""
        assert isinstance(content.data, OwnData) and self.options.budget is not None
        self.say(f"asking {content.model_name} {len(content.data.asked)} prompts")
        functions = [rewards.find(name, "--reward") for name in self.options.rewards]
        loaded = _write_recipe(self.draft, content)
        spec = BaseSpec(loaded.recipe.model, loaded.recipe.tokenizer)
        seconds = 60 * ASKING * self.options.budget
        asked, prompt, response = content.data.asked, content.max_prompt_length, content.response_length
        found = probe.ask(spec, self.facts.tokenizer, functions, asked, prompt, response, seconds, self.say.done)
        if found is None:
            why = f"the base gave no answer within {seconds:.0f} s, so responses may have the {response} tokens that "
            advice = "--max-length admits; it may need fewer: try again while nothing else runs, or with more --minutes"
            return content._replace(notes=(why + advice,))
        return content._replace(response_length=found.tokens, notes=(found.words,))

    def within_budget(self, content: Content, fitted: Fit) -> Content:
        """Return the content with as much training as the budget allows. Raises UserError where it is too little."""
        self._measure(content)
        if self.options.budget is None:
            return content
        self.say(f"looking for what {self.options.budget:g} minutes allow")
        try:
            chosen = budget.within(self.options.budget, content, self._times(fitted))
        except UserError as error:
            raise UserError(*error.lines, *content.notes) from error
        more = (chosen.longer,) if chosen.longer else ()
        return chosen.content._replace(notes=(*content.notes, *more))

    def _measure(self, content: Content) -> None:
        """Measure the rates of a CPU, once."""
        if self.options.card.is_cpu and self.rates is None:
            self.say("measuring how fast this machine is")
            self.rates = machine.rates(_write_recipe(self.draft, content).recipe, anew=True)

    def _times(self, fitted: Fit) -> Callable[[Content], budget.Times]:
        """Return what projects the minutes of a content. It raises UserError where they are not known."""

        def times(tried: Content) -> budget.Times:
            self._measure(tried)
            loaded = _write_recipe(self.draft, tried)
            hours, trained = (
                planning.training_hours(loaded, fitted.stages, self.own, evaluated=part) for part in (True, False)
            )
            if missing := [stage for stage in self.options.trained if stage not in hours]:
                raise UserError(f"--minutes {self.options.budget:g}: how many rows {missing[0]} has is not known")
            whole, rest = 60 * sum(hours.values()), 60 * sum(trained.values())
            return budget.Times(whole, whole - rest)

        return times


def _write_recipe(folder: Path, content: Content) -> PinnedRecipe:
    """Write recipe.yaml into a folder. Return the recipe as it is read back."""
    (folder / "recipe.yaml").write_text(render("recipe.yaml", content), encoding="utf-8")
    return recipes.load(folder)


def _place(draft: Path, target: Path) -> None:
    """Copy a finished folder beside its place and rename it, so that it appears complete. Raises UserError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        shutil.copytree(draft, temporary / "v1")
        sync_tree(temporary / "v1")
        os.rename(temporary / "v1", target)  # fails if another process has filled the place meanwhile
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise UserError(f"{target} exists already: choose another name with --name, or delete it") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if not any(target.parent.iterdir()):
            target.parent.rmdir()
