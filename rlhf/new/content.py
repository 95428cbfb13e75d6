"""What a new recipe says: what follows from the options of `rlhf new` and the model, and the filled templates."""

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf import recipe as recipes
from rlhf.data.formats import ParsedRows
from rlhf.errors import OptionError
from rlhf.new.data import DataSet, OwnData, read_data
from rlhf.new.model import ModelFacts, ModelFiles
from rlhf.new.options import ChosenCard, NewOptions
from rlhf.recipe import StageName, TrainingName
from rlhf.recipe.context import context_length, too_long
from rlhf.recipe.learning_rates import adapter_rate
from rlhf.recipe.model_types import LEAN_TYPES
from rlhf.recipe.stages import TRAINING_STAGES

ROLLOUTS = 32  # of a step of PPO, RLOO or GRPO
FUNCTION_ROLLOUTS = 64  # of a step that functions alone reward: at first few responses are right (cpu-smollm2-sums)
PPO_STEPS = 500
LEAST_STEPS = 100  # of a stage that functions reward: two passes over few questions teach little
SMALL = 2_000  # rows, of which a larger share is held out: a tenth would be few to measure on
CHAT_TOKENS, BASE_TOKENS = 1024, 512  # of a sequence, unless --max-length says otherwise, or all rows are shorter
CPU_TOKENS = 256  # the same on a CPU
BATCH = 16  # rows of an optimizer's step of the other stages


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
    size: str  # of the model, in words
    chat: bool
    max_prompt_length: int
    response_length: int
    steps: int  # of PPO, RLOO and GRPO
    batch_size: int  # responses of such a step
    rates: Mapping[TrainingName, str]  # learning rates
    trained: tuple[TrainingName, ...]
    rewards: tuple[str, ...]
    small: bool  # few rows
    sft: Supervised
    rm: Supervised
    dpo: Supervised
    kto: Supervised
    ppo: Online = Online()
    rloo: Online = Online()
    grpo: Online = Online()
    evaluate: Evaluation = Evaluation()
    evaluations: int = 10  # of PPO, RLOO and GRPO while they train
    heldout: int = 128  # prompts of each of them
    heldout_rows: int = 500  # of an evaluation of the other stages
    sampled: int = 256  # prompts of the stage `evaluate`
    validated: bool = True  # prompts apart from those for reporting choose checkpoints
    quantization: str = "none"
    lean: bool = False
    notes: tuple[str, ...] = ()  # what was found out for this recipe

    @property
    def max_length(self) -> int:
        """Return the tokens of a prompt with its response."""
        return self.max_prompt_length + self.response_length

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


def initial_content(options: NewOptions, model: ModelFiles, facts: ModelFacts, rows: ParsedRows | None) -> Content:
    """Return what the templates are filled with, before settings that need less memory are searched for.

    rows: of the files that --data names, as `check_data` returns them.
    """
    chat = facts.tokenizer_settings["template"] == "chat"
    data = read_data(options, rows, options.data or ("ultrafeedback" if chat else "hh",), facts.tokenizer)
    data_name = options.task or (data.name.rpartition("/")[2] if isinstance(data, DataSet) else "data of your own")
    model_name = Path(model.name).name
    known = (data.pairs or data.prompts) if isinstance(data, OwnData) else None
    batch_size = ROLLOUTS if options.has_reward_model else FUNCTION_ROLLOUTS
    steps = PPO_STEPS if known is None else min(PPO_STEPS, max(20, 2 * known // batch_size // 10 * 10))
    if options.rewards:
        steps = max(LEAST_STEPS, steps)
    prompt, response = _lengths(options, data, chat, context_length(facts.architecture))
    width = int(facts.architecture["hidden_size"])
    rates = {stage: adapter_rate(stage, width, chat) for stage in TRAINING_STAGES}

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
        size=size_in_words(facts.parameters),
        chat=chat,
        max_prompt_length=prompt,
        response_length=response,
        steps=steps,
        batch_size=batch_size,
        rates={stage: f"{rate:.0e}".replace("e-0", "e-") for stage, rate in rates.items()},
        trained=options.trained,
        rewards=options.rewards,
        small=known is not None and known < SMALL,
        sft=supervised(2_000 if chat else 20_000, known),
        rm=supervised(50_000, known),
        dpo=supervised(20_000, known),
        kto=supervised(20_000, known),
        ppo=Online(rollout_batch_size=batch_size),
        rloo=Online(rollout_batch_size=batch_size),
        grpo=Online(rollout_batch_size=batch_size),
        lean=options.card.is_cpu and facts.architecture["model_type"] in LEAN_TYPES,
    )


def _lengths(options: NewOptions, data: DataSet | OwnData, chat: bool, context: int | None) -> tuple[int, int]:
    """Return the tokens of a prompt and of a response. Raises OptionError where --max-length exceeds the context.

    Prompts get a half of a sequence, or what the longest of own prompts needs if no pairs say how long answers are.
    """
    usual = CPU_TOKENS if options.card.is_cpu else CHAT_TOKENS if chat else BASE_TOKENS
    longest = options.max_length or (min(usual, data.longest or usual) if isinstance(data, OwnData) else usual)
    if options.max_length and (problem := too_long({"--max-length": longest}, context)):
        raise OptionError(problem)
    longest = min(longest, context or longest)
    prompt = longest // 2
    if isinstance(data, OwnData) and data.longest is None and not options.max_length:
        prompt = min(prompt, -(-data.longest_prompt // BATCH) * BATCH)
        return prompt, longest // 2
    return prompt, longest - prompt


def supervised(most: int, known: int | None, part: float = 1.0) -> Supervised:
    """Return a stage's keys for a part of its rows; a set whose size is not known is cut at `most` of them."""
    rows = min(most, known or most)
    limit = most if known is None else None
    if part < 1:
        rows = limit = max(BATCH, round(part * rows / BATCH) * BATCH)
    return Supervised(limit, steps_between_evaluations(rows), steps_between_logged_rows(rows))


def size_in_words(parameters: int) -> str:
    """Return a number of parameters in words: `8.2 billion`, `135 million`, `220 thousand`."""
    for unit, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if parameters >= unit:
            return f"{parameters / unit:.3g} {word}" if parameters < 100 * unit else f"{parameters / unit:.0f} {word}"
    return str(parameters)


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
    return environment.get_template(f"{template}.jinja").render(
        content._asdict() | {"max_length": content.max_length} | more
    )


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
