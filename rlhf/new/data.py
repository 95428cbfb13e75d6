"""The data of a new recipe: a pinned set of the hub, or files of rows that its stages and rewards can use."""

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlhf.data import formats
from rlhf.data.corpus import JUDGED
from rlhf.data.formats import ParsedRows
from rlhf.data.rows import Document, Example, Message, PreferencePair, PromptOnly
from rlhf.data.source import read_tasks
from rlhf.errors import OptionError, UserError, no_such
from rlhf.new.options import NewOptions
from rlhf.plan.own_rows import SAMPLE, UNCUT
from rlhf.recipe.schema_data import ReasoningGym
from rlhf.recipe.schema_online import MODEL_REWARD
from rlhf.recipe.stages import GRPO, ONLINE, SFT, STAGE_TABLE
from rlhf.recipe.strict import with_overrides
from rlhf.run.packages import package_version
from rlhf.stages.online.rewards import RewardFunction, find

if TYPE_CHECKING:
    from rlhf.data.tokenize import DialogueTokenizer

ASKED = 32  # prompts that are kept to ask a base
TASK_ROWS = 1_000  # questions of a task: seconds for most generators, minutes for those that solve puzzles
FIRST_QUESTIONS = 4  # of them, which show what kind of rows they are
SHORTEST = 128  # tokens of a sequence: a policy may say more than the rows


class DataSet(NamedTuple):
    """A preference set of the hub at a pinned commit."""

    name: str
    revision: str
    split: str | None
    format: str
    licence: str
    words: str
    files: tuple[str, ...] = ()
    task: None = None


class Asked(NamedTuple):
    """A prompt, and the right answer to it where there is one."""

    prompt: tuple[Message, ...]
    answer: str | None


class OwnData(NamedTuple):
    """Files of rows; in sequences of `longest` tokens all pairs fit, as far as they were counted."""

    files: tuple[str, ...]
    pairs: int
    prompts: int  # distinct ones, with or without answers
    longest: int | None  # None where no answers tell how long responses may be
    longest_prompt: int  # tokens of the longest prompt, as far as they were counted
    asked: tuple[Asked, ...]  # some prompts
    task: Mapping[str, object] | None = None  # keys of data.reasoning_gym, where a task's generator makes the rows
    columns: Mapping[str, object] = {}  # keys of the section `data` about the columns of the files

    @property
    def words(self) -> str:
        """Return in words how many rows there are: `200 prompts`."""
        if self.task:
            return f"{self.prompts:,} questions of the task {self.task['task']} of reasoning-gym {self.task['version']}"
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


def check_files(options: NewOptions) -> None:
    """Raise OptionError for --data beside a task, or a name that is neither a file nor, alone, that of a pinned set."""
    names = options.data
    if options.task and names:
        raise OptionError("--task makes the data itself: give --task or --data, not both")
    if options.changes and (not names or names[0] in DATA_SETS):
        raise OptionError(f"--set {next(iter(options.changes))} is about the rows of files: name them with --data")
    if len(names) == 1 and names[0] in DATA_SETS:
        return
    for file in names:
        if not Path(file).exists():
            way_out = f"{' or '.join(DATA_SETS)} names a set of the hub"
            raise OptionError(no_such("file", f"--data {file or repr('')}", way_out))


def check_data(options: NewOptions) -> ParsedRows | None:
    """Return the rows of the files that --data names, before any model is read; None for a pinned set or a task.

    The rows must be those that the stages and the rewards need; a few questions stand for all of a task. Raises
    OptionError, UserError.
    """
    if options.task:
        with _task_rows(options.task, FIRST_QUESTIONS) as rows:
            _check_rows(options, f"--task {options.task}", rows)
        return None
    if not options.data or (len(options.data) == 1 and options.data[0] in DATA_SETS):
        if comparing := _comparing(options):
            raise OptionError(f"--reward {comparing[0].name} needs right answers: name a file of them with --data")
        return None
    files = [str(Path(file).resolve()) for file in options.data]
    rows = formats.read([*files], formats.RowOptions.of_changes(files, dict(options.changes), "skip"))
    _check_rows(options, f"--data {options.data[0]}", rows)
    return rows


def read_data(
    options: NewOptions, rows: ParsedRows | None, names: tuple[str, ...], tokenizer: "DialogueTokenizer"
) -> DataSet | OwnData:
    """Return the data that --data names, whose `rows` were read by `check_data`, or that a task makes.

    names: --data, or the pinned set that is taken without it. Raises UserError for a task whose questions do not suit.
    """
    if options.task:
        with _task_rows(options.task, TASK_ROWS) as made:
            _check_rows(options, f"--task {options.task}", made)
            own = _own_data(made, (), tokenizer)
            section = _task_section(options.task, len(made.rows))
            return own._replace(task=section)
    if rows is None:
        return DATA_SETS[names[0]]
    own = _own_data(rows, tuple(str(Path(file).resolve()) for file in names), tokenizer)
    columns = with_overrides({"data": {}}, options.changes)["data"]
    assert isinstance(columns, dict)
    return own._replace(columns=columns)


def _own_data(rows: ParsedRows, files: tuple[str, ...], tokenizer: "DialogueTokenizer") -> OwnData:
    asked = {row.prompt: _answer(row) for row in rows.rows if not isinstance(row, Document)}
    sample = random.Random(0).sample(sorted(asked, key=repr), min(SAMPLE, len(asked)))
    ids, _ = tokenizer.encode_prompts(sample, UNCUT)
    return OwnData(
        files,
        len(rows.pairs),
        len(asked),
        _longest(rows.pairs, tokenizer) if rows.pairs else None,
        max(map(len, ids)),
        tuple(Asked(prompt, asked[prompt]) for prompt in sample[:ASKED]),
    )


def _task_section(task: str, size: int) -> dict[str, object]:
    """Return the keys of data.reasoning_gym."""
    return {"version": package_version("reasoning-gym") or "0", "task": task, "size": size}


@contextmanager
def _task_rows(task: str, size: int) -> Iterator[ParsedRows]:
    """Give questions of a task of reasoning-gym, as a run will make them. Raises UserError where it cannot."""
    with tempfile.TemporaryDirectory(prefix="rlhf-task-") as folder:
        section = ReasoningGym.model_validate(_task_section(task, size))
        yield read_tasks(section, 0, Path(folder), complete=False)


def _comparing(options: NewOptions) -> list[RewardFunction]:
    """Return the rewards that compare with a right answer."""
    functions = [find(name, "--reward") for name in options.rewards if name != MODEL_REWARD]
    return [function for function in functions if function.needs_answer]


def _check_rows(options: NewOptions, source: str, rows: ParsedRows) -> None:
    """Raise UserError where a stage or a reward has no rows that it could use."""
    _check_kinds(options, source, rows)
    _check_answers(_comparing(options), source, rows)


def _answer(row: Example | PreferencePair | PromptOnly) -> str | None:
    return None if isinstance(row, PreferencePair) else row.right_answer


def _check_kinds(options: NewOptions, source: str, rows: ParsedRows) -> None:
    """Raise UserError where a stage has no rows that it could learn from."""
    on_pairs = [STAGE_TABLE[stage].title for stage in options.stages if STAGE_TABLE[stage].rows == "pairs"]
    needing = ["the reward model"] * options.has_reward_model + on_pairs
    if needing and not rows.pairs:
        functions_may = options.has_reward_model and not options.rewards and not {*ONLINE}.isdisjoint(options.stages)
        instead = "; --reward NAME, a function, needs none" if functions_may else ""
        if options.rewards and not options.has_reward_model:
            instead = f"; --stages {GRPO} needs none"
        raise UserError(f"{source}: no preference pairs, which {needing[0]} needs{instead} (docs/data.md)")
    judged = [STAGE_TABLE[stage].title for stage in options.stages if STAGE_TABLE[stage].rows == "judged"]
    if judged and not (rows.pairs or any(example.good is not None for example in rows.examples)):
        raise UserError(f"{source}: no {JUDGED}, which {judged[0]} needs (docs/data.md)")
    if options.policy_start == SFT and not (rows.pairs or any(example.good is not False for example in rows.examples)):
        raise UserError(f"{source}: no responses, which SFT needs: --start base leaves it out (docs/data.md)")
    if not (rows.pairs or rows.examples or rows.bare_prompts):
        raise UserError(f"{source}: no prompts there (docs/data.md)")


def _check_answers(comparing: Sequence[RewardFunction], source: str, rows: ParsedRows) -> None:
    """Raise UserError where a reward has no right answers to compare with, or one that no response can match."""
    judged: list[Example | PromptOnly] = [*rows.examples, *rows.bare_prompts]
    answers = [(row.source, row.right_answer) for row in judged if row.right_answer is not None]
    for function in comparing:
        if not answers:
            wanted = '{"prompt", "answer"} (docs/data.md)'
            raise UserError(f"{source}: no right answers, which --reward {function.name} needs: rows of {wanted}")
        for place, answer in answers:
            if fault := function.answer_fault(answer):
                raise UserError(f"{place}: --reward {function.name} cannot compare with its answer: it {fault}")


def _longest(pairs: Sequence[PreferencePair], tokenizer: "DialogueTokenizer") -> int:
    """Return the tokens of a sequence, one half of which holds each prompt and the other one each answer."""
    sample = random.Random(0).sample(pairs, min(SAMPLE, len(pairs)))
    rows = [(pair.prompt, answer) for pair in sample for answer in (pair.chosen, pair.rejected)]
    encoded, _ = tokenizer.encode(rows, UNCUT, UNCUT)
    half = max((len(ids) for row in encoded if row for ids in row), default=UNCUT)
    return max(SHORTEST, -(-2 * half // 64) * 64)
