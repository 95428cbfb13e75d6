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
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rlhf import recipe as recipes
from rlhf.data import formats
from rlhf.errors import OptionError, UserError
from rlhf.files import sync_tree
from rlhf.memory import prediction_file
from rlhf.memory.cards import CARDS, size_in_bytes
from rlhf.memory.fit import Fit, fit
from rlhf.memory.predict import Predictor, needed
from rlhf.memory.strategies import four_bit_changes, micro_batch, with_changes
from rlhf.recipe import ONLINE, POLICIES, TRAINING_STAGES, Changes, PinnedRecipe, PolicyName, StageName
from rlhf.recipe.published import GB
from rlhf.use.new_model import ModelFacts, Source, describe, read_model

SIZES_GB = (6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 192)  # memory of cards that are sold
TemplateName = Literal["chat", "hh", "plain"]
TEMPLATES: tuple[TemplateName, ...] = get_args(TemplateName)
USED = 0.95  # share of the card that settings may need: nothing predicted was measured on a GPU yet
LARGE = 20e9  # parameters: between the 13B and the 33B at which QLoRA (arXiv 2305.14314, appendix B) halves the rate
ROLLOUTS = 32  # of a step of PPO, RLOO or GRPO
PPO_STEPS = 500
CHAT_TOKENS, BASE_TOKENS = 1024, 512  # of a sequence, unless --max-length says otherwise
Say = Callable[[str], None]


class ChosenCard(NamedTuple):
    """A card by its name in recipes, with its memory."""

    name: str
    memory_gb: float
    note: str  # where the memory is from

    @property
    def limit(self) -> int:
        """Return the bytes that settings may need."""
        return round(self.memory_gb * GB * USED)

    @property
    def words(self) -> str:
        """Return the card in words: `one RTX 4090`, `one card with 12 GB`."""
        return f"one {CARDS[self.name].words}" if self.name in CARDS else f"one card with {self.memory_gb:g} GB"


KNOWN_CARDS = {name: ChosenCard(name, *card.memory) for name, card in CARDS.items() if card.memory}


class DataSet(NamedTuple):
    """A preference set of the hub at a pinned commit."""

    name: str
    revision: str
    split: str | None
    format: str
    licence: str
    words: str
    files: tuple[str, ...] = ()
    pairs: int | None = None  # not counted before it is downloaded


class OwnData(NamedTuple):
    """Files with preference pairs."""

    files: tuple[str, ...]
    pairs: int


DATA_SETS = {
    "hh": DataSet(
        "Anthropic/hh-rlhf",
        "09be8c5bbc57cb3887f3a9732ad6aa7ec602a1fa",
        None,
        "hh",
        "MIT",
        "dialogues whose better answer people chose",
    ),
    "ultrafeedback": DataSet(
        "HuggingFaceH4/ultrafeedback_binarized",
        "3949bf5f8c17c394422ccfab0c31ea9c20bdeb85",
        "train_prefs",
        "preference",
        "MIT",
        "instructions with answers of several models, of which GPT-4 rated one higher",
    ),
}


class NewOptions(NamedTuple):
    """The options of `rlhf new`."""

    model: str
    card: ChosenCard
    stages: tuple[StageName, ...] = ("ppo", "dpo")
    data: tuple[str, ...] = ()  # files, or a key of DATA_SETS; empty: the one that suits the template
    revision: str | None = None
    template: TemplateName | None = None
    max_length: int | None = None
    name: str | None = None


def card_of(text: str) -> ChosenCard:
    """Return the card that --card names: `4090`, `h100` or a size such as `24GB`. Raises OptionError."""
    if text.lower() in KNOWN_CARDS:
        return KNOWN_CARDS[text.lower()]
    size = size_in_bytes(text)
    if size is None:
        cards = ", ".join(KNOWN_CARDS)
        raise OptionError(f"--card {text}: name a size with its unit, for example 24GB, or one of {cards}")
    return ChosenCard(re.sub(r"\s", "", text.lower()), round(size / GB, 2), "as given by --card")


def stages_of(text: str) -> tuple[PolicyName, ...]:
    """Return the stages that --stages names: `ppo,dpo`. Raises OptionError."""
    names = dict.fromkeys(part.strip() for part in text.split(","))
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise OptionError(f"--stages {text}: {unknown[0] or 'an empty name'} is none of {', '.join(POLICIES)}")
    return tuple(name for name in names if name in POLICIES)


def target_of(root: Path, options: NewOptions) -> Path:
    """Return the folder of the new recipe. Raises UserError if it exists, OptionError if its name cannot be one."""
    name = options.name or f"{options.card.name}-{_slug(options.model)}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise OptionError(f"--name {name}: letters, digits, points, hyphens and underscores only")
    target = root / name / "v1"
    if os.path.lexists(target):
        raise UserError(f"{target} exists already: choose another name with --name, or delete it")
    return target


def _slug(model: str) -> str:
    """Return a model's name as part of a folder's name: `Qwen/Qwen3-8B` is `qwen3-8b`."""
    return re.sub(r"[^a-z0-9._-]+", "-", Path(os.path.abspath(model)).name.lower()).strip("-.") or "model"


# -- the recipe ------------------------------------------------------------------------------------------------------


class Supervised(NamedTuple):
    """What differs between the supervised stages of new recipes."""

    max_samples: int | None
    every: int  # steps between two evaluations
    optim: str = "adamw_torch_fused"
    per_device_train_batch_size: int = 16
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = True


class Online(NamedTuple):
    """What differs between the stages of new recipes that learn from their own samples."""

    optim: str = "adamw_torch_fused"
    per_device_train_batch_size: int = 8
    gradient_checkpointing: bool = True
    rollout_batch_size: int = ROLLOUTS


class Evaluation(NamedTuple):
    """What differs between the evaluations of new recipes."""

    batch_size: int = 32


class Content(NamedTuple):
    """What the templates are filled with."""

    title: str
    description: str
    model_name: str
    wanted: tuple[StageName, ...]
    source: Source
    card: ChosenCard
    data: DataSet | OwnData
    architecture: Mapping[str, object]  # keys of the recipe's section
    tokenizer: Mapping[str, object]  # keys of the recipe's section
    billions: float
    chat: bool
    large: bool
    max_length: int
    steps: int  # of PPO, RLOO and GRPO
    sft: Supervised
    rm: Supervised
    dpo: Supervised
    ppo: Online = Online()
    rloo: Online = Online()
    grpo: Online = Online()
    evaluate: Evaluation = Evaluation()
    quantization: str = "none"

    def with_changed_keys(self, changes: Mapping[str, Any]) -> "Content":
        """Return the content with changes of a recipe's keys: {"ppo.rollout_batch_size": 8}."""
        content = self
        for key, value in changes.items():
            section, name = key.split(".")
            if section == "model":
                content = content._replace(**{name: value})
            else:
                changed = getattr(content, section)._replace(**{name: value})
                content = content._replace(**{section: changed})
        return content


def settings(options: NewOptions, source: Source, facts: ModelFacts) -> Content:
    """Return what the templates are filled with, before settings that need less memory are searched for."""
    chat = facts.tokenizer["template"] == "chat"
    data = _data(options.data or ("ultrafeedback" if chat else "hh",))
    data_name = data.name.rpartition("/")[2] if isinstance(data, DataSet) else "data of your own"
    model = Path(source.name).name
    longest = options.max_length or (CHAT_TOKENS if chat else BASE_TOKENS)
    steps = PPO_STEPS if data.pairs is None else min(PPO_STEPS, max(20, 2 * data.pairs // ROLLOUTS // 10 * 10))

    def supervised(most: int) -> Supervised:
        limit = most if data.pairs is None else None
        return Supervised(limit, steps_between_evaluations(limit or data.pairs or PPO_STEPS * ROLLOUTS))

    return Content(
        title=f"{model} on {data_name}, for {options.card.words}",
        description=f"{model} on {data_name}, {' and '.join(options.stages)}, for {options.card.words}",
        model_name=model,
        wanted=options.stages,
        source=source,
        card=options.card,
        data=data,
        architecture=facts.architecture,
        tokenizer={"pad_token": None, "eos_token": None, "chat_template_kwargs": None, **facts.tokenizer},
        billions=round(facts.parameters / 1e9, 1 if facts.parameters < 20e9 else 0),
        chat=chat,
        large=facts.parameters > LARGE,
        max_length=min(longest, facts.architecture["max_position_embeddings"]),
        steps=steps,
        sft=supervised(2_000 if chat else 20_000),
        rm=supervised(50_000),
        dpo=supervised(20_000),
    )


def steps_between_evaluations(rows: int) -> int:
    """Return the steps between two evaluations in an epoch of `rows` rows, 16 a step: a quarter of it, at most 200."""
    return min(200, max(10, rows // 16 // 4 // 10 * 10))


def _data(names: tuple[str, ...]) -> DataSet | OwnData:
    """Return the data that --data names: files that can be read, or a pinned set. Raises OptionError, UserError."""
    if len(names) == 1 and names[0] in DATA_SETS:
        return DATA_SETS[names[0]]
    for file in names:
        if not Path(file).exists():
            sets = " or ".join(DATA_SETS)
            raise OptionError(f"--data {file}: there is no such file; {sets} names a set of the hub")
    files = tuple(str(Path(file).resolve()) for file in names)
    rows = formats.read([*files], on_bad_row="skip", advice=formats.CHECK_ADVICE)
    if not rows.pairs:
        raise UserError(f"--data {names[0]}: no preference pairs, which the reward model needs (docs/data.md)")
    return OwnData(files, len(rows.pairs))


def render(template: str, content: Content, **more: object) -> str:
    """Return a template of this package filled with the content and `more`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates"), encoding="utf-8"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["value"] = recipes.as_yaml
    environment.filters["quoted"] = "`{}`".format
    environment.filters["entry"] = _entry
    return environment.get_template(f"{template}.jinja").render(content._asdict() | more)


def _entry(item: tuple[str, object]) -> str:
    """Return one key of model.architecture as indented YAML; long lists are folded."""
    import yaml

    key, value = item
    if not isinstance(value, dict | list):
        return f"    {key}: {recipes.as_yaml(value)}\n"
    flow = yaml.safe_dump(value, default_flow_style=True, width=100, sort_keys=False)
    return textwrap.indent(f"{key}: {textwrap.indent(flow, '  ').strip()}\n", "    ")


# -- settings that fit -----------------------------------------------------------------------------------------------


def least_memory(loaded: PinnedRecipe, stages: Sequence[StageName], probe: bool = False) -> Changes:
    """Return the changes with which stages need the least memory: one row at a time, recomputed.

    With `probe` a step has two rollouts, which is quicker to rehearse and needs the same.
    """
    changes: Changes = {}
    for stage in stages:
        if stage in TRAINING_STAGES:
            changes |= {f"{stage}.gradient_checkpointing": True, **micro_batch(loaded, stage, 1)}
        if stage in ONLINE:
            per_prompt = loaded.recipe.online()[stage].samples_per_prompt
            changes[f"{stage}.rollout_batch_size"] = per_prompt
            if probe:
                changes |= {f"{stage}.batch_size": 2 * per_prompt, f"{stage}.num_mini_batches": 1}
    return changes


def search(
    predict: Predictor, loaded: PinnedRecipe, parameters: int, stages: Sequence[StageName], limit: int, say: Say
) -> Fit:
    """Return the fastest settings with which each of `stages` needs at most `limit` bytes.

    A bfloat16 base (2 bytes a parameter) is tried before one in 4 bits, where it has room. Raises UserError if nothing
    fits, with the smallest card that would.
    """
    four_bit = four_bit_changes(stages)
    if 2 * parameters < limit:
        fitted = fit(predict, loaded, stages, limit, say)  # tries 4 bits by itself
        if not fitted.too_large:
            return fitted
    elif parameters / 2 < limit:
        fitted = fit(predict, with_changes(loaded, four_bit), stages, limit, say)
        if not fitted.too_large:
            return fitted._replace(changes=four_bit | fitted.changes)
    on_4bit = with_changes(loaded, four_bit)
    least = with_changes(on_4bit, {"evaluate.batch_size": 1, **least_memory(on_4bit, stages, probe=True)})
    needs = {}
    for stage in stages:
        say(f"predicting the least that {stage} needs")
        needs[stage] = needed(predict(least, stage)[""])
    raise UserError(_too_large(needs, limit))


def _too_large(needs: Mapping[StageName, int], limit: int) -> str:
    stage = max(needs, key=needs.__getitem__)
    least = needs[stage] / GB
    card = next((size for size in SIZES_GB if USED * size >= least), None)
    advice = f"the smallest card that would do has {card} GB" if card else "no card that is sold would do"
    return (
        f"{limit / GB:.3g} GB, {USED:.0%} of the card, are too few: {stage} needs {math.ceil(10 * least) / 10:g} GB "
        f"even with a 4-bit base and one row at a time; {advice}. --max-length makes rows shorter"
    )


# -- the folder ------------------------------------------------------------------------------------------------------


class NewRecipe(NamedTuple):
    """A new recipe with what is predicted for it."""

    folder: Path
    loaded: PinnedRecipe
    stages: tuple[StageName, ...]
    fit: Fit


def make(root: Path, options: NewOptions, predict: Predictor, say: Say) -> NewRecipe:
    """Write a recipe into `root` and return it. `say` is told what is being done.

    Raises UserError for a model, data or a card that cannot be used, and if the folder exists. Nothing is left behind
    then, and neither after Ctrl-C.
    """
    target = target_of(root, options)
    say(f"reading {options.model}")
    source = read_model(options.model, options.revision)
    facts = describe(source, options.template)
    content = settings(options, source, facts)
    stages: tuple[StageName, ...] = ("sft", "rm", *(stage for stage in POLICIES if stage in options.stages), "evaluate")
    with tempfile.TemporaryDirectory(prefix="rlhf-new-") as folder:
        draft = Path(folder) / target.parent.name / "v1"
        draft.mkdir(parents=True)
        loaded = _write_recipe(draft, content)
        fitted = search(predict, loaded, facts.parameters, stages, options.card.limit, say)
        required: tuple[StageName, ...] = ("ppo", "dpo")  # sections of every recipe; untrained ones are kept small
        untrained = [stage for stage in required if stage not in stages]
        untrained_changes = least_memory(loaded, untrained)
        if fitted.changes.get("model.quantization") == "nf4":
            untrained_changes |= four_bit_changes(untrained)
        content = content.with_changed_keys(untrained_changes | fitted.changes)
        loaded = _write_recipe(draft, content)
        readme = render("README.md", content, recipe_name=target.parent.name, folder=target)
        (draft / "README.md").write_text(readme, encoding="utf-8")
        say("predicting the whole chain")
        step, _ = prediction_file.decoding_step(predict, loaded)
        prediction_file.pin(
            draft, prediction_file.predict(predict, loaded), step, None, prediction_file.needs(predict, loaded)
        )
        _place(draft, target)
    return NewRecipe(target, recipes.load(target), stages, fitted)


def _write_recipe(folder: Path, content: Content) -> PinnedRecipe:
    """Write recipe.yaml into a folder and read it back."""
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
