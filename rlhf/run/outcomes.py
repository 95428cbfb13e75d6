"""Typed records of what evaluations, checks of data and reproductions have written."""

from collections.abc import Mapping

from pydantic import Field

from rlhf.run.records import Amount, Code, Count, DataFile, Device, Number, OfRecipe, Record, Summary


class Answer(Record):
    """One policy's answer to a prompt, with its scores."""

    response: str
    score: Number | None = None
    true_reward: Number | None = None
    second_score: Number | None = None
    rewards: dict[str, Number] = Field(default={})  # of reward functions, by name

    @property
    def given(self) -> dict[str, float]:
        """Return what judges and reward functions gave, by their names."""
        by_judge = {"true_reward": self.true_reward, **self.rewards}
        by_judge |= {"score": self.score, "second_score": self.second_score}
        return {name: number for name, number in by_judge.items() if number is not None}


class SampleLine(Record):
    """A line of an evaluation's samples.jsonl: a prompt and the answer of each policy."""

    __pydantic_extra__: dict[str, str | Answer]
    prompt: str
    step: Count = 0
    sample: Count = 0
    messages: list[object] = Field(default=[])
    expected: str | None = None  # the right answer, or else the one that people chose

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Return the answers by policy."""
        return {name: answer for name, answer in self.__pydantic_extra__.items() if isinstance(answer, Answer)}


class Reproduction(OfRecipe):
    """The record that `rlhf reproduce` writes: the summaries of a chain by seed and stage."""

    code: Code
    device: Device
    packages: dict[str, str]
    price_per_hour: Amount | None = None
    rows: list[DataFile] = Field(default=[])  # files that `--data` named, without their folders
    seeds: dict[str, dict[str, Summary]]
