"""Checked tasks that no stage trains, of `evaluate.unrelated`: their prompts, and the rewards of policies' answers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf.data import formats
from rlhf.data.corpus import Corpus, Prompt, Split
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.evaluation.best_of_n import PerPrompt
from rlhf.evaluation.policies import EvaluationRewards, heldout_sampling, measure
from rlhf.evaluation.unrelated import ANSWERS_EACH, task_name
from rlhf.files import JsonObject
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import Recipe
from rlhf.recipe.names import Role
from rlhf.stages.online import reward_functions
from rlhf.stages.online.reward_call import RewardFunction, json_messages
from rlhf.stages.online.reward_sum import check_answers, settle
from rlhf.terminal import say

WHERE = "evaluate.unrelated"


@dataclass(frozen=True)
class CheckedTask:
    """A task: its prompts, what their right answers are, and the function that checks answers."""

    name: str
    prompts: list[Prompt]
    right_answers: dict[Prompt, str]
    function: RewardFunction
    facts: JsonObject  # for details.json


def load(recipe: Recipe, tokenizer: DialogueTokenizer, folder: Path, device: torch.device) -> list[CheckedTask]:
    """Read the tasks of a recipe; a judge keeps its marks in `folder`. Raises UserError for rows that cannot be used.

    Of each the first `evaluate.max_samples` distinct prompts count, those with a right answer if the function needs it.
    """
    tasks = []
    for task in recipe.evaluate.unrelated or ():
        found = reward_functions.find(task.reward, WHERE)
        settle(found)
        function = found.opened(folder, None, 0, device.type)
        rows = formats.read((task.file,), on_bad_row="stop")
        corpus = Corpus(Split([], [*rows.rows]))
        answers = corpus.right_answers()
        prompts = list(dict.fromkeys(row.prompt for row in corpus.with_prompts.test))
        if function.needs_answer:
            prompts = [prompt for prompt in prompts if prompt in answers]
        prompts = prompts[: recipe.evaluate.max_samples]
        if not prompts:
            raise UserError(f'{WHERE}: {task.file} has no prompts with a right answer: rows are {{"prompt", "answer"}}')
        if function.needs_answer:
            check_answers(f"{WHERE}: {task.file}", function, prompts, answers)
        _, cut = tokenizer.encode_prompts(prompts, recipe.evaluate.max_prompt_length)
        if cut:
            say(f"{WHERE}: {cut} prompts of {task.file} are cut at evaluate.max_prompt_length")
        facts: JsonObject = {
            "file": task.file,
            "sha256": rows.report.files[0].sha256,
            "reward": task.reward,
            "prompts": len(prompts),
        }
        tasks.append(CheckedTask(task_name(task), prompts, answers, function, facts))
    return tasks


def rewards_of(
    tasks: Sequence[CheckedTask], shared: SharedBase, role: Role, tokenizer: DialogueTokenizer, recipe: Recipe
) -> dict[str, PerPrompt]:
    """Return the rewards of a role's answers by task, of ANSWERS_EACH for each prompt those with a verdict."""
    rewards = {}
    for task in tasks:
        samples = measure(
            shared,
            role,
            tokenizer,
            task.prompts,
            heldout_sampling(recipe.evaluate),
            seed=recipe.seed,
            with_true_reward=False,
            samples_per_prompt=ANSWERS_EACH,
            reward_fn=_judge(task, tokenizer, recipe.seed),
        )
        repeats = samples.by_prompt(samples.rewards[task.name])
        rewards[task.name] = [[number for number in row if not math.isnan(number)] for row in repeats]
    return rewards


def _judge(task: CheckedTask, tokenizer: DialogueTokenizer, seed: int) -> EvaluationRewards:
    """Return the function that gives the rewards of a task under its name, and leaves the scores as they are."""

    def judged(
        prompts: Sequence[Prompt], texts: Sequence[str], scores: Tensor | None, ids: Sequence[list[int]]
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        written = [tokenizer.prompt_text(prompt) for prompt in prompts]
        answers = [task.right_answers.get(prompt) for prompt in prompts]
        messages = [json_messages(prompt) for prompt in prompts]
        numbers = task.function(written, texts, answers, ids, seed, messages)
        return {task.name: torch.tensor([math.nan if number is None else number for number in numbers])}, scores

    return judged
