"""Typed records of what run directories hold. `rlhf/run/reader.py` reads files as one of them.

A record declares the keys that code reads; a file may have others, which are kept beside them. A version that changes
the meaning of a key increases SCHEMA.
"""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Self, TypedDict

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from rlhf.files import JsonObject, finite
from rlhf.recipe import StageName, moved
from rlhf.recipe.published import Figure, Verdict, verdict_of
from rlhf.terminal.wording import GB

SCHEMA = 1


class Record(BaseModel):
    """An object in a file. Types are strict; other keys are kept."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())

    def plain(self) -> dict[str, Any]:
        """Return the object with the keys that it was read with, without defaults."""
        return self.model_dump(by_alias=True, exclude_unset=True)


def _as_it_is(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Return a valid number unchanged. Pydantic would turn the integers of a file into floats."""
    validate(value)
    return value


Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False), WrapValidator(_as_it_is)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False), WrapValidator(_as_it_is)]
Schema = Annotated[int, Field(alias="schema", ge=1, le=SCHEMA)]


class OfRecipe(Record):
    """What names the recipe in a record."""

    recipe: str
    version: str
    recipe_sha256: str
    released_sha256: str | None = None  # of the released file, if the recipe's was edited since


# -- manifest.json ---------------------------------------------------------------------------------------------------


class Device(Record):
    """The device that a stage ran on. Of a GPU its record also has memory, cap (RLHF_VRAM_CAP), CUDA and driver."""

    name: str
    type: str
    model: str | None = None  # of a CPU
    threads: Count | None = None  # of a CPU
    processes: Count = 1

    def text(self) -> str:
        """Return the card's name, or the processor's with its threads, as far as the record has them."""
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        return f"{self.model or self.name}{threads}"


class Code(Record):
    """The commit of the code that ran, and whether files differed from it; None where git does not say."""

    commit: str | None
    dirty: bool | None


class DataFile(Record):
    """A file of data, with its hash, the number of its rows and their kind."""

    name: str
    sha256: str
    rows: Count | None = None
    kind: str | None = None


class DataRead(Record):
    """The fingerprint of the data that a stage read. Its record also counts the rows that were left out, by reason."""

    sha256: str
    files: list[DataFile]
    documents: Count = 0
    examples: Count = 0
    pairs: Count = 0
    prompts: Count = 0
    left_out: list[str] = []  # rows, each with the reason
    notes: list[str] = []  # what the rows were taken for, columns beside, what is odd


class Manifest(OfRecipe):
    """The content of manifest.json. A key with a default is not there in every stage, or was added later."""

    schema_: Schema = SCHEMA
    recipe_folder: str | None = None  # from which the recipe was read
    overrides: dict[str, Any]
    seed: Count
    settings: Annotated[dict[str, Any], AfterValidator(moved.read_past)]  # that decide what the stage produces
    parents: dict[StageName, str]  # hashes of their summaries
    base_hashes: dict[str, str] = {}  # the hash of each file of a local base and its tokenizer
    code: Code
    packages: dict[str, str]
    device: Device
    argv: list[str] = []
    started: str | None = None  # UTC, ISO 8601
    resumed_from: str | None = None  # name of the checkpoint
    data: DataRead | None = None
    base: dict[str, Any] | None = None  # the record of a GGUF file's conversion
    reward_functions: dict[str, str] = {}  # of an evaluation: as the recipe writes them, by name


# -- summary.json ----------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """A figure with the value beside it, None for none, and what is said of it."""

    figure: Figure
    value: float | None
    verdict: Verdict


def compared(figure: Figure, value: float | None) -> JsonObject:
    """Return a comparison as summary.json keeps it: the figure's keys and printed ends, the value, the verdict."""
    value = None if value is None else finite(value)
    verdict = verdict_of(figure, value)
    return figure.model_dump(mode="json", exclude_defaults=True) | {
        "published": list(figure.printed),
        "measured": value,
        "verdict": verdict.word,
        "detail": verdict.detail,
    }


class Costs(TypedDict):
    """The keys of summary.json that a stage's telemetry measures. Those of a GPU are None on a CPU."""

    tokens_per_second: float | None
    phase_seconds: dict[str, float]
    peak_vram_bytes: int | None  # allocated by torch
    phase_peak_bytes: dict[str, int] | None
    reserved_vram_bytes: int | None  # held by torch's allocator
    used_vram_bytes: int | None  # of the card, by all processes and the driver
    phase_joules: dict[str, int] | None  # None also where the card does not count energy
    peak_rss_bytes: int
    component_bytes: dict[str, int] | None  # base, adapters and optimizer states


class Summary(OfRecipe):
    """The content of summary.json, with the keys of `Costs`. A key with a default was added later."""

    schema_: Schema = SCHEMA
    modified: bool
    stage: StageName
    seed: Count
    device: str  # its name
    processes: Count = 1
    wall_seconds: Amount
    predicted_peak_vram_bytes: Amount | None = None
    projected_hours: Amount | None = None
    tokens_per_second: Amount | None
    phase_seconds: dict[str, Amount] = {}
    peak_vram_bytes: Amount | None
    peak_rss_bytes: Amount
    result_sha256: dict[str, str]  # of each file of the result
    metrics: dict[str, Number | None]
    findings: list[str] | None = None  # None in summaries older than the checks
    targets: list[dict[str, Any]]  # as `compared` returns them
    all_stages: list[Figure] = []  # of all stages together

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        try:
            _ = self.figures
        except (KeyError, TypeError, ArithmeticError) as error:
            raise ValueError(f"targets: {type(error).__name__} {error}") from error
        return self

    @property
    def figures(self) -> list[Compared]:
        """Return the figures with which the stage was compared; a record that is older than verdicts has none."""
        found = []
        for target in (target for target in self.targets if "verdict" in target):
            figure = Figure.model_validate({key: target[key] for key in Figure.model_fields if key in target})
            found.append(Compared(figure, target["measured"], verdict_of(figure, target["measured"])))
        return found

    def spent(self, price: float | None) -> dict[str, float | None]:
        """Return what the stage took, by the metrics of figures; dollars by the price of an hour of one card."""
        hours, peak = self.wall_seconds / 3600, self.peak_vram_bytes
        cost = None if price is None else hours * self.processes * price
        return {"peak_vram_gb": peak / GB if peak else None, "hours": hours, "cost_usd": cost}


# -- checkpoints, generated data, reproductions, lines of logs -------------------------------------------------------


class Checkpoint(Record):
    """The content of checkpoint.json, which is written last into a checkpoint's folder."""

    step: Count
    wall_seconds: Amount
    sha256: dict[str, str]  # of each file beside it
    log_lines: dict[str, Count]  # lines of each log at the checkpoint


class Generated(Record):
    """The content of made.json beside generated data: the hash of each file."""

    sha256: dict[str, str]


class Reproduction(OfRecipe):
    """The record that `rlhf reproduce` writes: the summaries of a chain by seed and stage."""

    code: Code
    device: Device
    packages: dict[str, str]
    price_per_hour: Amount | None = None
    rows: list[DataFile] = Field(default=[])  # files that `--data` named, without their folders
    seeds: dict[str, dict[str, Summary]]


class MetricsLine(Record):
    """A line of metrics.jsonl."""

    step: Count
    __pydantic_extra__: dict[str, Number | None]

    @property
    def values(self) -> Mapping[str, float | None]:
        """Return the logged values by key; None for one that was not finite."""
        return self.__pydantic_extra__


class FindingLine(Record):
    """A line of findings.jsonl."""

    step: Count
    check: str
    seen: str
    cause: str


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
