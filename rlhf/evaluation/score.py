"""Scores by a run's reward model: prompts with answers, the model, the statistics of its scores, and their file."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf import stats
from rlhf.data import formats
from rlhf.data.parsing import Prompt
from rlhf.data.rows import Example, PreferencePair, of_kind
from rlhf.errors import UserError
from rlhf.files import JsonObject, json_lines, write_output
from rlhf.process import environment
from rlhf.recipe import parents
from rlhf.recipe.schema import Rm
from rlhf.recipe.stages import RM
from rlhf.run.directory import StageRun
from rlhf.run.finished import reward_model_digest
from rlhf.run.layout import ADAPTER
from rlhf.terminal import say


class Item(NamedTuple):
    """A prompt and its answers by name."""

    source: str
    prompt: Prompt
    answers: dict[str, str]


def read(files: Sequence[str | Path]) -> list[Item]:
    """Return the items of data files: pairs, and demonstrations. Raises UserError for files without answers."""
    data = formats.read(files)
    for note in data.notes:
        say(note)
    items = [
        Item(row.source, row.prompt, {"chosen": row.chosen, "rejected": row.rejected})
        for row in of_kind(data.rows, PreferencePair)
    ]
    items += [Item(row.source, row.prompt, {"response": row.response}) for row in of_kind(data.rows, Example)]
    if not items:
        raise UserError(f"{', '.join(map(str, files))}: no answers; score needs pairs, or prompts with a completion")
    return items


class ScoredItem(NamedTuple):
    """An item with its prompt as the model read it and the score of each answer; None if all its tokens were cut."""

    item: Item
    prompt: str
    scores: dict[str, float | None]

    @property
    def margin(self) -> float | None:
        """Return the score of the chosen answer minus that of the rejected one; None if the item is not a pair."""
        chosen, rejected = self.scores.get("chosen"), self.scores.get("rejected")
        return None if chosen is None or rejected is None else chosen - rejected


class RewardModel:
    """The reward model of a finished run."""

    def __init__(self, run: StageRun):
        """Load the model. Raises ParentMissing if it is not done, and UserError if it was made with other settings."""
        recipe, folder = run.loaded.recipe, run.require(RM)
        for stage in parents(recipe, RM):
            run.require(stage)
        environment.prepare(recipe)
        from rlhf.models.loading import load_base, load_tokenizer
        from rlhf.models.shared_base import SharedBase
        from rlhf.process.torch_setup import set_up_torch

        self.options = recipe.options(Rm)
        self.digest = reward_model_digest(run.run_directory)
        device = set_up_torch(recipe)
        self.tokenizer = load_tokenizer(run.base)
        self.shared = SharedBase(load_base(run.base, device), {"reference": run.policy_start()})
        self.shared.add_reward(folder / ADAPTER)

    def score(self, items: Sequence[Item]) -> tuple[list[ScoredItem], dict[str, int]]:
        """Return each item with its answers' raw scores, and the numbers of prompts and responses that were cut.

        Answers are cut and end with EOS as in training, as if each was finished. An answer that stopped at a limit of
        length was scored without EOS by the stage that sampled it, so its score here differs.
        """
        from rlhf.evaluation.reward_model import scores_of

        keys = [(number, name) for number, item in enumerate(items) for name in item.answers]
        rows, cut = self.tokenizer.encode(
            [(items[number].prompt, items[number].answers[name]) for number, name in keys],
            self.options.max_prompt_length,
            self.options.max_length,
        )
        scorable = {key: row for key, row in zip(keys, rows, strict=True) if row}
        batch = 2 * self.options.per_device_train_batch_size
        values = scores_of([*scorable.values()], self.shared.scores_at, self.tokenizer.pad_id, batch)
        scores = dict(zip(scorable, values.tolist(), strict=True))
        return [
            ScoredItem(
                item,
                self.tokenizer.prompt_text(item.prompt),
                {name: scores.get((number, name)) for name in item.answers},
            )
            for number, item in enumerate(items)
        ], cut


def accuracy(scored: Sequence[ScoredItem]) -> stats.Estimate | None:
    """Return in which share of the pairs the chosen answer scores higher, where a tie counts half; None without pairs.

    Pairs of one prompt may depend on each other.
    """
    margins = [(row.margin, row.prompt) for row in scored if row.margin is not None]
    outcomes = stats.outcomes([margin for margin, _ in margins])
    return stats.clustered_share(outcomes, [prompt for _, prompt in margins]) if margins else None


def write(scored: Sequence[ScoredItem], reward_model: str | None, file: Path) -> None:
    """Write lines in the layout of a run's samples.jsonl, each with the hash of the reward model's weights."""
    write_output(file, json_lines(_line(row, reward_model) for row in scored))


def _line(row: ScoredItem, reward_model: str | None) -> JsonObject:
    line: JsonObject = {"source": row.item.source, "reward_model": reward_model, "prompt": row.prompt}
    for name, score in row.scores.items():
        line[name] = {"response": row.item.answers[name], "score": score}
    return line | ({"margin": row.margin} if row.margin is not None else {})
