"""`rlhf new`: a recipe for a model and a card: the nearest one, with the model, the rows and settings that fit.

Of a model on the hub only config.json and the tokenizer's files are downloaded. The result is a folder
`<recipes>/<card>-<model>/v1/` with recipe.yaml, which appears complete or not at all.
"""

import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlhf import recipe as recipes
from rlhf.errors import OptionError, UserError
from rlhf.files import JsonObject
from rlhf.new.content import every, initial, with_lengths
from rlhf.new.model import check_name, describe, read_model
from rlhf.new.options import NewOptions
from rlhf.plan.fit import Fit, fit
from rlhf.plan.own_rows import OwnRows, read_rows
from rlhf.plan.predict import Predictor, card_needed_bytes
from rlhf.process.libraries import quiet_libraries
from rlhf.recipe import Changes, PinnedRecipe, StageName
from rlhf.recipe.context import context_length, too_long
from rlhf.recipe.schema_online import MODEL_REWARD
from rlhf.recipe.stages import ONLINE
from rlhf.recipe.strict import with_overrides
from rlhf.stages.online import rewards
from rlhf.terminal.wording import GB

FEWEST = 10  # steps, however few rows there are
SMALL = 2_000  # rows, of which a fifth is held out: a tenth would be few to measure on
SHORTEST = 64  # tokens of a response: a policy may say more than the rows
Say = Callable[[str], None]


class NewRecipe(NamedTuple):
    """A new recipe with what is predicted for it."""

    folder: Path
    loaded: PinnedRecipe
    fit: Fit  # without stages for a type of model whose memory is not predicted


def check(recipes_root: Path, options: NewOptions) -> Path:
    """Return the folder of the new recipe. Raises UserError for what is wrong before any model is read."""
    check_name(options.model, options.revision)
    if options.rewards and {*ONLINE}.isdisjoint(options.stages):
        raise OptionError(f"--reward is for {', '.join(ONLINE)}: name one of them with --stages")
    for name in options.rewards:
        if name != MODEL_REWARD:
            rewards.find(name, "--reward")
    model = Path(os.path.abspath(options.model)).name.lower().removesuffix(".gguf")
    slug = re.sub(r"[^a-z0-9._-]+", "-", model).strip("-.") or "model"
    name = options.name or "-".join(filter(None, (options.card.name, slug, options.task)))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise OptionError(f"--name {name}: letters, digits, points, hyphens and underscores only")
    target = recipes_root / name / "v1"
    if os.path.lexists(target):
        raise UserError(f"{target} exists already: choose another name with --name, or delete it")
    return target


def make(recipes_root: Path, options: NewOptions, predictor: Predictor, say: Say) -> NewRecipe:
    """Return a new recipe, written into the folder of recipes. `say` is told what is being done.

    Raises UserError for a model, data or a card that cannot be used; nothing is left behind then.
    """
    target = check(recipes_root, options)
    with quiet_libraries(), tempfile.TemporaryDirectory(prefix="rlhf-new-") as folder:
        say(f"reading {options.model}")
        model = read_model(options.model, options.revision)
        facts = describe(model)
        draft = Path(folder) / target.parent.name / "v1"
        content = initial(options, model, facts)
        say("reading the rows")
        own = read_rows(_written(draft, content).recipe, options.trained)
        content = _sized(options, content, own, context_length(facts.architecture))
        loaded = _written(draft, content)
        fitted = _fitted(options, predictor, loaded, say) if facts.predicted else _small(options)
        target.parent.mkdir(parents=True, exist_ok=True)
        return NewRecipe(target, _written(target, with_overrides(content, fitted.changes)), fitted)


def _written(folder: Path, content: JsonObject) -> PinnedRecipe:
    """Write recipe.yaml into a folder, complete or not at all. Return the recipe as it is read back."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    temporary = folder / ".recipe.yaml"
    temporary.write_text(f"# docs/keys.yaml explains every key. Nothing of it was measured yet.\n{text}")
    os.replace(temporary, folder / "recipe.yaml")
    return recipes.load(folder)


def _sized(options: NewOptions, content: JsonObject, own: OwnRows | None, context: int | None) -> JsonObject:
    """Return the content with the lengths of its rows. Raises UserError where a stage has none."""
    if options.max_length and (problem := too_long({"--max-length": options.max_length}, context)):
        raise OptionError(problem)
    if own is None:
        return with_lengths(content, options.max_length // 2, None) if options.max_length else content
    if own.lacking:
        raise UserError(f"--data {options.data[0]}: {next(iter(own.lacking.values()))}")
    if max(rows.train for rows in own.stages.values()) < SMALL:
        content = with_overrides(content, {"data.heldout_fraction": 0.2})
    lengths = [row for rows in own.stages.values() for row in rows.lengths]
    longest = _tokens(content, options)
    prompt = _rounded(max(row[0] for row in lengths))
    response = max(SHORTEST, _rounded(1 + max(max(row[1:]) for row in lengths)))
    if prompt + response > longest:  # the longer one gives way
        half = longest // 2
        prompt = min(prompt, max(half, longest - response))
        response = longest - prompt
    content = with_lengths(content, prompt, response)
    for name, rows in own.stages.items():
        if name in ONLINE:
            section: Any = content[name]
            steps = max(
                FEWEST,
                min(section["steps"], 4 * rows.train * section.get("num_generations", 1) // section["batch_size"]),
            )
            content = content | {name: section | {"steps": steps} | every(section, steps)}
        else:
            content = with_overrides(content, {f"{name}.{key}": v for key, v in every({}, rows.train // 16).items()})
    return content


def _tokens(content: JsonObject, options: NewOptions) -> int:
    """Return the tokens of the longest sequence that the recipe may have."""
    evaluate: Any = content["evaluate"]
    return options.max_length or int(evaluate["max_prompt_length"] + evaluate["response_length"])


def _rounded(tokens: int) -> int:
    return -(-tokens // 16) * 16


def _fitted(options: NewOptions, predictor: Predictor, loaded: PinnedRecipe, say: Say) -> Fit:
    """Return settings that fit. Raises UserError if none does.

    For a card they are the fastest of each stage. On a CPU the neediest stage is looked at alone, with its micro-batch
    halved until it fits.
    """
    stages: tuple[StageName, ...] = (*options.trained, "evaluate")
    if options.card.is_cpu:
        stages = options.trained[-1:]
    say("looking for settings that fit")
    found = fit(predictor.predict, loaded, stages, options.card.limit, compress=not options.card.is_cpu)
    if found.too_large:
        stage = found.too_large[0]
        needs = math.ceil(10 * card_needed_bytes(found.stages[stage].whole) / GB) / 10
        raise UserError(
            f"{stage} needs {needs:g} GB, and {options.card.limit / GB:.1f} GB may be used ({options.card.name}): make "
            "rows shorter with --max-length, or choose a smaller model or a larger card"
        )
    return found


def _small(options: NewOptions) -> Fit:
    """Return settings that need little, for a type of model whose memory is not predicted."""
    changes: Changes = {"evaluate.batch_size": 8}
    for stage in options.trained:
        changes |= {f"{stage}.per_device_train_batch_size": 2, f"{stage}.gradient_checkpointing": True}
        if stage not in ONLINE:
            changes[f"{stage}.gradient_accumulation_steps"] = 8
    return Fit(changes, {}, ())
