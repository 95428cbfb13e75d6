"""What a new recipe says: the options of `rlhf new`, what follows from them and the model, and the filled templates."""

import random
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from rlhf import recipe as recipes
from rlhf.commands.new_model import ModelFacts, ModelFiles
from rlhf.data import formats
from rlhf.data.rows import PreferencePair
from rlhf.errors import OptionError, UserError, no_such
from rlhf.memory.card.cards import CARDS
from rlhf.recipe import StageName
from rlhf.recipe.model_types import LEAN_TYPES
from rlhf.terminal.wording import GB

if TYPE_CHECKING:
    from rlhf.data.tokenize import Codec

TemplateName = Literal["chat", "hh", "plain"]
TEMPLATES: tuple[TemplateName, ...] = get_args(TemplateName)
USED = 0.95  # share of the card that settings may need: nothing predicted was measured on a GPU yet
LARGE = 20e9  # parameters: between the 13B and the 33B at which QLoRA (arXiv 2305.14314, appendix B) halves the rate
ROLLOUTS = 32  # of a step of PPO, RLOO or GRPO
PPO_STEPS = 500
CHAT_TOKENS, BASE_TOKENS = 1024, 512  # of a sequence, unless --max-length says otherwise, or all rows are shorter
CPU_TOKENS = 256  # the same on a CPU
CPU_STEPS, CPU_ROWS = 50, 2_000  # of PPO, RLOO and GRPO, and of each other stage: hours on a CPU, not days
SHORTEST = 128  # tokens of a sequence: a policy may say more than the rows
COUNTED = 2_000  # pairs whose tokens are counted
UNCUT = 2**30  # tokens


class ChosenCard(NamedTuple):
    """A card by its name in recipes, with its memory; or the processor of this machine, `cpu`."""

    name: str
    memory_gb: float
    note: str  # where the memory is from
    threads: int | None = None  # of a processor

    @property
    def is_cpu(self) -> bool:
        """Return whether this is the processor."""
        return self.threads is not None

    @property
    def limit(self) -> int:
        """Return the bytes that settings may need."""
        return round(self.memory_gb * GB * USED)

    @property
    def words(self) -> str:
        """Return the card in words: `one RTX 4090`, `one card with 12 GB`, `a CPU with 16 GB free`."""
        if self.is_cpu:
            return f"a CPU with {self.memory_gb:g} GB free"
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
    """Files with preference pairs; in sequences of `longest` tokens all fit, as far as they were counted."""

    files: tuple[str, ...]
    pairs: int
    longest: int


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


class Supervised(NamedTuple):
    """What differs between the supervised stages of new recipes."""

    max_samples: int | None
    every: int  # steps between two evaluations
    logging_steps: int
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
    model: ModelFiles
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
    lean: bool = False

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


def initial_content(options: NewOptions, model: ModelFiles, facts: ModelFacts) -> Content:
    """Return what the templates are filled with, before settings that need less memory are searched for."""
    chat = facts.tokenizer["template"] == "chat"
    data = _data(options.data or ("ultrafeedback" if chat else "hh",), facts.codec)
    data_name = data.name.rpartition("/")[2] if isinstance(data, DataSet) else "data of your own"
    model_name = Path(model.name).name
    cpu = options.card.is_cpu
    usual = CPU_TOKENS if cpu else CHAT_TOKENS if chat else BASE_TOKENS
    longest = options.max_length or (min(usual, data.longest) if isinstance(data, OwnData) else usual)
    most_steps = CPU_STEPS if cpu else PPO_STEPS
    steps = most_steps if data.pairs is None else min(most_steps, max(20, 2 * data.pairs // ROLLOUTS // 10 * 10))

    def supervised(most: int) -> Supervised:
        """Return a stage's keys; a set whose size is not known is cut at `most` rows."""
        limit = min(most, CPU_ROWS) if cpu else most if data.pairs is None else None
        rows = min(limit or PPO_STEPS * ROLLOUTS, data.pairs or PPO_STEPS * ROLLOUTS)
        return Supervised(limit, steps_between_evaluations(rows), steps_between_logged_rows(rows))

    return Content(
        title=f"{model_name} on {data_name}, for {options.card.words}",
        description=f"{model_name} on {data_name}, {_listed(options.stages)}, for {options.card.words}",
        model_name=model_name,
        wanted=options.stages,
        model=model,
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
        lean=cpu and facts.architecture["model_type"] in LEAN_TYPES,
    )


def steps_between_evaluations(rows: int) -> int:
    """Return the steps between two evaluations in an epoch of `rows` rows, 16 a step: a quarter of it, at most 200."""
    return min(200, max(10, rows // 16 // 4 // 10 * 10))


def steps_between_logged_rows(rows: int) -> int:
    """Return the logging_steps of an epoch of `rows` rows, 16 a step: so that at least ten are logged, if that many.

    It divides 10, as the steps between two evaluations have to be a multiple. About a tenth of the rows is held out, by
    chance a few more.
    """
    steps = rows * 17 // 20 // 16
    return next((each for each in (10, 5, 2) if steps // each >= 10), 1)


def _data(names: tuple[str, ...], codec: "Codec") -> DataSet | OwnData:
    """Return the data that --data names: files that can be read, or a pinned set. Raises OptionError, UserError."""
    if len(names) == 1 and names[0] in DATA_SETS:
        return DATA_SETS[names[0]]
    for file in names:
        if not Path(file).exists():
            way_out = f"{' or '.join(DATA_SETS)} names a set of the hub"
            raise OptionError(no_such("file", f"--data {file or repr('')}", way_out))
    files = tuple(str(Path(file).resolve()) for file in names)
    rows = formats.read([*files], on_bad_row="skip", advice=formats.CHECK_ADVICE)
    if not rows.pairs:
        raise UserError(f"--data {names[0]}: no preference pairs, which the reward model needs (docs/data.md)")
    return OwnData(files, len(rows.pairs), _longest(rows.pairs, codec))


def _longest(pairs: Sequence[PreferencePair], codec: "Codec") -> int:
    """Return the tokens of a sequence, one half of which holds each prompt and the other one each answer."""
    sample = random.Random(0).sample(pairs, min(COUNTED, len(pairs)))
    rows = [(pair.prompt, answer) for pair in sample for answer in (pair.chosen, pair.rejected)]
    encoded, _ = codec.encode(rows, UNCUT, UNCUT)
    half = max((len(ids) for row in encoded if row for ids in row), default=UNCUT)
    return max(SHORTEST, -(-2 * half // 64) * 64)


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
    environment.filters["listed"] = _listed
    environment.filters["entry"] = _entry
    return environment.get_template(f"{template}.jinja").render(content._asdict() | more)


def _listed(words: Iterable[str]) -> str:
    """Return words as a list in a sentence: `ppo, dpo and grpo`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _entry(item: tuple[str, object]) -> str:
    """Return one key of model.architecture as indented YAML; long lists are folded."""
    import yaml

    key, value = item
    if not isinstance(value, dict | list):
        return f"    {key}: {recipes.as_yaml(value)}\n"
    flow = yaml.safe_dump(value, default_flow_style=True, width=100, sort_keys=False)
    return textwrap.indent(f"{key}: {textwrap.indent(flow, '  ').strip()}\n", "    ")
