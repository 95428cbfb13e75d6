"""The keys of a recipe about the evaluation of its policies."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from rlhf.recipe.bounds import BatchRows, Name, RowCount, Samples, Temperature, Tokens
from rlhf.recipe.strict import AsTuple, Section


class UnrelatedTask(Section):
    """A task that no stage trains, which shows what a policy forgot."""

    file: Name  # rows with a prompt and a right answer
    reward: Name  # the function that checks answers: docs/rewards.md


class Evaluate(Section):
    """The comparison of policies with SFT on held-out prompts."""

    max_samples: RowCount
    batch_size: BatchRows
    response_length: Tokens
    max_prompt_length: Tokens
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # sample from the fewest tokens with this total probability
    num_samples: Samples = 1  # answers of each policy to each prompt
    bertscore_model: Name | None = None  # folder of a BERT-like encoder; null: no BERTScore
    unrelated: Annotated[tuple[UnrelatedTask, ...] | None, AsTuple] = None  # checked tasks that nothing trains

    @field_validator("unrelated")
    @classmethod
    def _check_names(cls, tasks: tuple[UnrelatedTask, ...] | None) -> tuple[UnrelatedTask, ...] | None:
        """Raise ValueError for two files of one name, which names the task in metrics."""
        names = [Path(task.file).stem for task in tasks or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two files are named {twice}: rename one, because it names the task")
        return tasks
