"""Scores of items by a run's reward model: the model, the statistics of its scores, and their file."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple

from rlhf import stats
from rlhf.data.parsing import parse_prompt
from rlhf.data.rows import Message
from rlhf.evaluation.score_items import Item
from rlhf.files import JsonObject, json_lines, write_output
from rlhf.process import cuda
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.schema import Rm
from rlhf.recipe.stages import EVALUATE, PRETRAIN, RM, SFT
from rlhf.run.directory import StageRun
from rlhf.run.finished import read_summary, reward_model_digest

PAIR = ("chosen", "rejected")


class ScoredItem(NamedTuple):
    """An item with its prompt as the model read it and the score of each answer; None if all its tokens were cut."""

    item: Item
    prompt: str
    scores: dict[str, float | None]

    @property
    def margin(self) -> float | None:
        """Return the score of the chosen answer minus that of the rejected one; None if the item is not a pair."""
        chosen, rejected = (self.scores.get(side) for side in PAIR)
        return None if chosen is None or rejected is None else chosen - rejected


class Stages(NamedTuple):
    """The run whose reward model scores, and the directories of its finished stages."""

    run: StageRun
    sft: Path | None  # None in a recipe without SFT
    rm: Path


def finished_stages(loaded: PinnedRecipe, out: Path) -> Stages:
    """Return the stages that scoring needs. No library is imported before.

    Raises ParentMissing if one is not done, and UserError if it was done with other settings.
    """
    run = StageRun(out, loaded, EVALUATE)
    rm = run.parents.require(RM)
    sft = run.parents.require(SFT) if loaded.recipe.sft else None
    if loaded.recipe.pretrain:
        run.parents.require(PRETRAIN)
    return Stages(run, sft, rm)


class RewardModel:
    """The reward model of a finished run."""

    def __init__(self, stages: Stages):
        """Load the model."""
        run, recipe = stages.run, stages.run.loaded.recipe
        cuda.set_environment(recipe)
        from rlhf.models.loading import load_base, load_tokenizer
        from rlhf.models.shared_base import SharedBase
        from rlhf.process.torch_setup import set_up_torch

        self.options = recipe.options(Rm)
        summary = read_summary(stages.rm)
        digest = reward_model_digest(summary) if summary else None
        assert digest  # `finished_stages` has checked it
        self.digest = digest  # names the reward model in output files
        device = set_up_torch(recipe)
        self.tokenizer = load_tokenizer(run.base)
        self.shared = SharedBase(load_base(run.base, device), {"reference": stages.sft})
        self.shared.add_reward(stages.rm)

    def score(self, items: Sequence[Item]) -> tuple[list[ScoredItem], dict[str, int]]:
        """Return each item with its answers' raw scores, and the numbers of prompts and responses that were cut.

        Answers are cut and end with EOS as in training, as if each was finished. An answer that stopped at a limit of
        length was scored without EOS by the stage that sampled it, so its score here differs.
        """
        from rlhf.evaluation.reward_model import scores_of

        limits = self.options.max_prompt_length, self.options.max_length
        ending = self._prompt_text((Message("user", "Hello."),)).rpartition("Hello.")[2]
        items = [_parsed(item, ending) for item in items]
        texts = [self._prompt_text(item.prompt) for item in items]
        messages, written = {}, {}
        for number, item in enumerate(items):
            for name, answer in item.answers.items():
                if isinstance(item.prompt, str):
                    written[number, name] = item.prompt, answer
                else:
                    messages[number, name] = item.prompt, answer
        rows, counts = self.tokenizer.encode([*messages.values()], *limits)
        written_rows, written_counts = self.tokenizer.encode_written([*written.values()], *limits)
        encoded = dict(zip((*messages, *written), (*rows, *written_rows), strict=True))
        cut = {key: counts[key] + written_counts[key] for key in ("prompts_cut", "responses_cut")}
        keys = [(number, name) for number, item in enumerate(items) for name in item.answers]
        scorable = {key: row for key in keys if (row := encoded[key])}
        batch = 2 * self.options.per_device_train_batch_size
        values = scores_of([*scorable.values()], self.shared.scores_at, self.tokenizer.pad_id, batch)
        scores: dict[tuple[int, str], float | None] = dict(zip(scorable, values.tolist(), strict=True))
        return [
            ScoredItem(item, text, {name: scores.get((number, name)) for name in item.answers})
            for number, (item, text) in enumerate(zip(items, texts, strict=True))
        ], cut

    def _prompt_text(self, prompt: tuple[Message, ...] | str) -> str:
        """Return a prompt as the text that the model reads."""
        return prompt if isinstance(prompt, str) else self.tokenizer.prompt_text(prompt)


def _parsed(item: Item, ending: str) -> Item:
    """Return an item with its prompt as messages, unless a run wrote it: then it has the `ending` of the template."""
    if not isinstance(item.prompt, str) or item.prompt.endswith(ending):
        return item
    return item._replace(prompt=parse_prompt(item.prompt, item.source, item.row.get("system")))


class ScoreFigures(NamedTuple):
    """Statistics of the scores of all answers of one name."""

    answers: int
    mean: float
    sd: float
    low: float
    high: float


class ScoreSummary(NamedTuple):
    """Statistics of scores: of all pairs the accuracy (a tie counts half) and mean margin, and those of each answer."""

    pairs: int
    accuracy: stats.Estimate | None  # with its 95 % interval, in which pairs of one prompt may depend on each other
    margin: float | None
    scores: dict[str, ScoreFigures]  # by the answer's name


def summary(scored: Sequence[ScoredItem]) -> ScoreSummary:
    """Return statistics of the scores."""
    margins = [row.margin for row in scored if row.margin is not None]
    prompts = [row.prompt for row in scored if row.margin is not None]
    values = defaultdict(list)
    for row in scored:
        for name, score in row.scores.items():
            if score is not None:
                values[name].append(score)
    return ScoreSummary(
        pairs=len(margins),
        accuracy=stats.clustered_share(stats.outcomes(margins), prompts) if margins else None,
        margin=fmean(margins) if margins else None,
        scores={name: ScoreFigures(len(v), fmean(v), pstdev(v), min(v), max(v)) for name, v in values.items()},
    )


def write(scored: Sequence[ScoredItem], reward_model: str, file: Path) -> None:
    """Write lines in the layout of a run's samples.jsonl, each with the hash of the reward model's weights."""
    write_output(file, json_lines(_line(row, reward_model) for row in scored))


def _line(row: ScoredItem, reward_model: str) -> JsonObject:
    """Return the line of an item."""
    line: JsonObject = {"step": 0, "source": row.item.source, **row.item.row}
    line |= {"reward_model": reward_model, "prompt": row.prompt}
    for name, score in row.scores.items():
        previous = line.get(name)
        kept: JsonObject = previous if isinstance(previous, dict) else {}
        line[name] = {**kept, "response": row.item.answers[name], "score": score}
    return line | ({"margin": row.margin} if row.margin is not None else {})
