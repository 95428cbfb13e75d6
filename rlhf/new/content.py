"""What a new recipe says: the options of `rlhf new`, what follows from them and the model, and the filled templates."""

import random
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from peakmem import cards
from rlhf import recipe as recipes
from rlhf.data import formats
from rlhf.data.corpus import JUDGED
from rlhf.data.formats import ParsedRows
from rlhf.data.rows import Document, Example, PreferencePair, PromptOnly
from rlhf.errors import OptionError, UserError, no_such
from rlhf.new.model import ModelFacts, ModelFiles
from rlhf.plan.fit import USABLE
from rlhf.plan.own_rows import SAMPLE, UNCUT
from rlhf.recipe import MODEL_REWARD, ONLINE, POLICIES, PolicyName, PolicyStart, StageName
from rlhf.recipe.context import context_length, too_long
from rlhf.recipe.model_types import LEAN_TYPES
from rlhf.recipe.stages import DPO, PPO, RM, SFT, STAGE_TABLE
from rlhf.stages.online import reward_functions
from rlhf.stages.online.reward_call import RewardFunction
from rlhf.terminal.wording import GB

if TYPE_CHECKING:
    from rlhf.data.tokenize import DialogueTokenizer

TemplateName = Literal["chat", "hh", "plain"]
TEMPLATES: tuple[TemplateName, ...] = get_args(TemplateName)
LARGE = 20e9  # parameters: between the 13B and the 33B at which QLoRA (arXiv 2305.14314, appendix B) halves the rate
ROLLOUTS = 32  # of a step of PPO, RLOO or GRPO
PPO_STEPS = 500
LEAST_STEPS = 100  # of a stage that functions reward: two passes over few questions teach little
SMALL = 1_000  # questions, of which a larger share is held out: a tenth would be few to measure on
TOY = 50e6  # parameters: such models learn nothing at the rates of others; recipes cpu-tiny have 2e-3
CHAT_TOKENS, BASE_TOKENS = 1024, 512  # of a sequence, unless --max-length says otherwise, or all rows are shorter
CPU_TOKENS = 256  # the same on a CPU
CPU_STEPS, CPU_ROWS = 50, 2_000  # of PPO, RLOO and GRPO, and of each other stage: hours on a CPU, not days
SHORTEST = 128  # tokens of a sequence: a policy may say more than the rows


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
        return round(self.memory_gb * GB * USABLE)

    @property
    def words(self) -> str:
        """Return the card in words: `one RTX 4090`, `one card with 12 GB`, `a CPU with 16 GB free`."""
        if self.is_cpu:
            return f"a CPU with {self.memory_gb:g} GB free"
        return (
            f"one {cards.CARDS[self.name].words}"
            if self.name in cards.CARDS
            else f"one card with {self.memory_gb:g} GB"
        )


KNOWN_CARDS = {name: ChosenCard(name, *card.memory) for name, card in cards.CARDS.items() if card.memory}


class DataSet(NamedTuple):
    """A preference set of the hub at a pinned commit."""

    name: str
    revision: str
    split: str | None
    format: str
    licence: str
    words: str
    files: tuple[str, ...] = ()


class OwnData(NamedTuple):
    """Files of rows; in sequences of `longest` tokens all pairs fit, as far as they were counted."""

    files: tuple[str, ...]
    pairs: int
    prompts: int  # distinct ones, with or without answers
    longest: int | None  # None where no answers tell how long responses may be

    @property
    def words(self) -> str:
        """Return in words how many rows there are: `200 prompts`."""
        return f"{self.pairs:,} preference pairs" if self.pairs else f"{self.prompts:,} prompts"


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
        "instructions with answers of several models; GPT-4 rated one of them higher",
    ),
}


class NewOptions(NamedTuple):
    """The options of `rlhf new`."""

    model: str
    card: ChosenCard
    stages: tuple[PolicyName, ...] = (PPO, DPO)
    data: tuple[str, ...] = ()  # files, or a key of DATA_SETS; empty: the one that suits the template
    revision: str | None = None
    template: TemplateName | None = None
    max_length: int | None = None
    name: str | None = None
    rewards: tuple[str, ...] = ()  # of PPO, RLOO and GRPO, as in `reward_funcs`; empty: the reward model
    start: PolicyStart | None = None  # where policies start; None: at the base if there are `rewards`, else at SFT

    @property
    def policy_start(self) -> PolicyStart:
        """Return where policies start."""
        return self.start or ("base" if self.rewards else SFT)

    @property
    def has_reward_model(self) -> bool:
        """Return whether the recipe has a reward model."""
        return not self.rewards or MODEL_REWARD in self.rewards

    @property
    def trained(self) -> tuple[StageName, ...]:
        """Return the stages of the recipe that train, in order."""
        has: dict[StageName, bool] = {SFT: self.policy_start == SFT, RM: self.has_reward_model}
        return (*(stage for stage in has if has[stage]), *(stage for stage in POLICIES if stage in self.stages))


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
    update_4bit: str = "packed"


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
    rate: str  # the learning rate of PPO, RLOO and GRPO
    trained: tuple[StageName, ...]
    rewards: tuple[str, ...]
    small: bool  # few questions
    sft: Supervised
    rm: Supervised
    dpo: Supervised
    kto: Supervised
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
    chat = facts.tokenizer_settings["template"] == "chat"
    data = _data(options, options.data or ("ultrafeedback" if chat else "hh",), facts.tokenizer)
    data_name = data.name.rpartition("/")[2] if isinstance(data, DataSet) else "data of your own"
    model_name = Path(model.name).name
    cpu = options.card.is_cpu
    usual = CPU_TOKENS if cpu else CHAT_TOKENS if chat else BASE_TOKENS
    longest = options.max_length or (min(usual, data.longest or usual) if isinstance(data, OwnData) else usual)
    context = context_length(facts.architecture)
    if options.max_length and (problem := too_long({"--max-length": longest}, context)):
        raise OptionError(problem)
    known = (data.pairs or data.prompts) if isinstance(data, OwnData) else None
    most_steps = CPU_STEPS if cpu else PPO_STEPS
    steps = most_steps if known is None else min(most_steps, max(20, 2 * known // ROLLOUTS // 10 * 10))
    if options.rewards:
        steps = max(LEAST_STEPS, steps)

    def supervised(most: int) -> Supervised:
        """Return a stage's keys; a set whose size is not known is cut at `most` rows."""
        limit = min(most, CPU_ROWS) if cpu else most if known is None else None
        rows = min(limit or PPO_STEPS * ROLLOUTS, known or PPO_STEPS * ROLLOUTS)
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
        tokenizer={"pad_token": None, "eos_token": None, "chat_template_kwargs": None, **facts.tokenizer_settings},
        billions=round(facts.parameters / 1e9, 1 if facts.parameters < 20e9 else 0),
        chat=chat,
        large=facts.parameters > LARGE,
        max_length=min(longest, context or longest),
        steps=steps,
        rate="5e-6" if facts.parameters > LARGE else "1e-3" if facts.parameters < TOY else "1e-5",
        trained=options.trained,
        rewards=options.rewards,
        small=bool(options.rewards) and known is not None and known < SMALL,
        sft=supervised(2_000 if chat else 20_000),
        rm=supervised(50_000),
        dpo=supervised(20_000),
        kto=supervised(20_000),
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


def _data(options: NewOptions, names: tuple[str, ...], tokenizer: "DialogueTokenizer") -> DataSet | OwnData:
    """Return the data that --data names: files that can be read, or a pinned set. Raises OptionError, UserError.

    The rows must be those that the stages and the rewards need.
    """
    functions = [reward_functions.find(name, "--reward") for name in options.rewards if name != MODEL_REWARD]
    comparing = [function for function in functions if function.needs_answer]
    if len(names) == 1 and names[0] in DATA_SETS:
        if comparing:
            raise OptionError(f"--reward {comparing[0].name} needs right answers: name a file of them with --data")
        return DATA_SETS[names[0]]
    for file in names:
        if not Path(file).exists():
            way_out = f"{' or '.join(DATA_SETS)} names a set of the hub"
            raise OptionError(no_such("file", f"--data {file or repr('')}", way_out))
    files = tuple(str(Path(file).resolve()) for file in names)
    rows = formats.read([*files], on_bad_row="skip", advice=formats.CHECK_ADVICE)
    _check_kinds(options, names[0], rows)
    _check_answers(comparing, names[0], rows)
    prompts = {row.prompt for row in rows.rows if not isinstance(row, Document)}
    return OwnData(files, len(rows.pairs), len(prompts), _longest(rows.pairs, tokenizer) if rows.pairs else None)


def _check_kinds(options: NewOptions, file: str, rows: ParsedRows) -> None:
    """Raise UserError where a stage has no rows that it could learn from."""
    on_pairs = [STAGE_TABLE[stage].title for stage in options.stages if STAGE_TABLE[stage].rows == "pairs"]
    needing = ["the reward model"] * options.has_reward_model + on_pairs
    if needing and not rows.pairs:
        functions_may = options.has_reward_model and not options.rewards and not {*ONLINE}.isdisjoint(options.stages)
        instead = "; --reward NAME, a function, needs none" if functions_may else ""
        raise UserError(f"--data {file}: no preference pairs, which {needing[0]} needs{instead} (docs/data.md)")
    judged = [STAGE_TABLE[stage].title for stage in options.stages if STAGE_TABLE[stage].rows == "judged"]
    if judged and not (rows.pairs or any(example.good is not None for example in rows.examples)):
        raise UserError(f"--data {file}: no {JUDGED}, which {judged[0]} needs (docs/data.md)")
    if options.policy_start == SFT and not (rows.pairs or any(example.good is not False for example in rows.examples)):
        raise UserError(f"--data {file}: no responses, which SFT needs: --start base leaves it out (docs/data.md)")
    if not (rows.pairs or rows.examples or rows.bare_prompts):
        raise UserError(f"--data {file}: no prompts there (docs/data.md)")


def _check_answers(comparing: Sequence[RewardFunction], file: str, rows: ParsedRows) -> None:
    """Raise UserError where a reward has no right answers to compare with, or one that no response can match."""
    judged: list[Example | PromptOnly] = [*rows.examples, *rows.bare_prompts]
    answers = [(row.source, row.right_answer) for row in judged if row.right_answer is not None]
    for function in comparing:
        if not answers:
            wanted = '{"prompt", "answer"} (docs/data.md)'
            raise UserError(f"--data {file}: no right answers, which --reward {function.name} needs: rows of {wanted}")
        for (source, _), fault in zip(answers, function.answer_faults([a for _, a in answers]), strict=True):
            if fault is not None:
                raise UserError(f"{source}: --reward {function.name} cannot compare with its answer: it {fault}")


def _longest(pairs: Sequence[PreferencePair], tokenizer: "DialogueTokenizer") -> int:
    """Return the tokens of a sequence, one half of which holds each prompt and the other one each answer."""
    sample = random.Random(0).sample(pairs, min(SAMPLE, len(pairs)))
    rows = [(pair.prompt, answer) for pair in sample for answer in (pair.chosen, pair.rejected)]
    encoded, _ = tokenizer.encode(rows, UNCUT, UNCUT)
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
