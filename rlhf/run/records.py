"""Typed records of what run directories hold. `rlhf/run/reader.py` reads files as one of them.

Unknown keys are kept: a newer version may add some. A version that changes the meaning of a key increases SCHEMA.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypedDict, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainSerializer,
    PrivateAttr,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from rlhf.files import JsonObject
from rlhf.recipe import StageName, moved
from rlhf.recipe.published import Figure, Spent, Verdict, verdict_of
from rlhf.terminal.wording import GB

SCHEMA = 1


# -- records ---------------------------------------------------------------------------------------------------------


class Record(BaseModel):
    """An object in a file of a run directory. Types are strict; unknown keys are kept."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())
    _content: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_content(cls, content: object, validate: ModelWrapValidatorHandler[Self]) -> Self:
        record = validate(content)
        if isinstance(content, dict):
            record._content = content
        return record

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copy = super().model_copy(update=update, deep=deep)
        copy._content = {**copy._content, **(update or {})}
        return copy

    def plain(self) -> dict[str, Any]:
        """Return the object as it was read: its keys in their order, without defaults."""
        return self._content


def _relative(name: str) -> str:
    """Return the name of a file inside a folder. Raises ValueError for any other path."""
    if not name or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise ValueError("not the name of a file inside the folder")
    return name


def _as_it_is(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    """Return a valid number unchanged. Pydantic would turn the integers of a file into floats."""
    validate(value)
    return value


Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False), WrapValidator(_as_it_is)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False), WrapValidator(_as_it_is)]
Name = Annotated[str, Field(pattern=r"^[^/\x00]+$")]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
InnerFile = Annotated[str, AfterValidator(_relative)]
Hashes = dict[InnerFile, Hash]
RecordT = TypeVar("RecordT", bound=Record)
AsRead = Annotated[RecordT, PlainSerializer(Record.plain)]  # written as it was read
ShortFigure = Annotated[Figure, PlainSerializer(lambda figure: figure.model_dump(mode="json", exclude_defaults=True))]


class Device(Record):
    """The device that a stage ran on."""

    name: str
    type: str
    model: str | None = None  # of a CPU
    threads: Count | None = None  # of a CPU
    memory_bytes: Count | None = None  # of a GPU, as the next three
    memory_cap: str | None = None  # RLHF_VRAM_CAP
    cuda: str | None = None
    driver: str | None = None
    processes: Count = 1
    engine: str | None = None  # which divides the work among the processes: ddp or fsdp

    def text(self) -> str:
        """Return the card's name, or the processor's with its threads, as far as the record has them."""
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        return f"{self.model or self.name}{threads}"


class Code(Record):
    """The commit of the code that ran, and whether files differed from it; None where git does not say."""

    commit: str | None
    dirty: bool | None


class DataFile(Record):
    """A file of data, with its hash."""

    name: str
    sha256: str
    rows: Count | None = None
    kind: str | None = None


class DataRead(Record):
    """The fingerprint of the data that a stage read."""

    sha256: str
    files: list[DataFile]
    documents: Count = 0
    examples: Count = 0
    pairs: Count = 0
    prompts: Count = 0
    malformed: Count = 0
    prompts_differ: Count = 0
    identical: Count = 0
    empty: Count = 0
    template: Count = 0  # rows that the tokenizer's template cannot write as they are
    not_made: Count = 0  # rows of which data.format made none
    left_out: list[str] = []  # rows, each with the reason
    notes: list[str] = []  # what the rows were taken for, columns beside, what is odd


class MergeSettings(Record):
    """The keys of a recipe's merge that are read from a manifest."""

    stage: StageName


class Settings(Record):
    """The settings in a manifest. These keys are read again; all keys are compared with a recipe's."""

    merge: MergeSettings | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _keep_content(cls, content: object, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Read past the keys of earlier versions: neither fields nor `plain` have them."""
        content = moved.read_past(content) if isinstance(content, dict) else content
        record = validate(content)
        if isinstance(content, dict):
            record._content = content
        return record


class Manifest(Record):
    """The content of manifest.json. A key with a default is not there in every stage, or was added later."""

    schema_: Annotated[int, Field(alias="schema", ge=1, le=SCHEMA)] = SCHEMA
    recipe: Name
    version: Name
    recipe_sha256: str
    released_sha256: str | None = None  # of the released file, if the recipe's was edited since
    overrides: dict[str, object]
    stage: StageName | None = None
    seed: Count
    settings: Settings
    parents: dict[StageName, Hash]
    parents_from: dict[StageName, str] = {}  # places of parents in another run directory, relative to this one
    code: Code
    packages: dict[str, str]
    python: str | None = None  # its version
    device: Device
    taken_out: list[str] = []  # variables of launchers and of arithmetic that were set, and decided nothing
    image: str | None = None  # of the container, if any
    argv: list[str] = []
    started: str | None = None  # UTC, ISO 8601
    resumed_from: str | None = None  # name of the checkpoint
    data: DataRead | None = None
    cuts: dict[str, object] = {}  # how many rows or prompts were cut to the recipe's lengths
    base: dict[str, object] | None = None  # the record of a GGUF file's conversion
    base_files: dict[str, str] = {}  # the hash of each file of a local base and its tokenizer


class Comparison(Record):
    """A figure with the value that a stage measured, as summary.json holds them."""

    name: str
    metric: str | None = None
    guide: str | None = None
    published: Annotated[list[Number | None], Field(min_length=2, max_length=2)]  # the figure's printed ends
    measured: Number | None

    @model_validator(mode="after")
    def _check_figure(self) -> Self:
        try:
            verdict_of(self.figure, self.measured)
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"not a comparison ({type(error).__name__}: {error})") from None
        return self

    @property
    def figure(self) -> Figure:
        """Return the figure that the value is compared with."""
        return figure_of_record(self.plain())

    @property
    def outcome(self) -> Verdict:
        """Return the verdict, computed from the figure and the value."""
        return verdict_of(self.figure, self.measured)


def compared(figure: Figure, value: float | None) -> JsonObject:
    """Return a comparison as summary.json keeps it: the figure's keys and printed ends, the value, the verdict."""
    verdict = verdict_of(figure, value)
    return figure.model_dump(mode="json", exclude_defaults=True) | {
        "published": list(figure.printed),
        "measured": value,
        "verdict": verdict.word,
        "detail": verdict.detail,
    }


def figure_of_record(entry: Mapping[str, Any]) -> Figure:
    """Return the figure of a record.

    Records that are older than verdicts hold only ranges; they are read as targets of our own.
    """
    if "verdict" in entry:
        return Figure.model_validate({key: entry[key] for key in Figure.model_fields if key in entry})
    return Figure.model_construct(  # unchecked: a single number stood as a range with equal ends
        name=entry["name"],
        stage="all",
        metric=entry.get("metric") or entry["name"],
        range=tuple(entry["published"]),
        range_of_mean=tuple(entry["published_mean"]) if entry.get("published_mean") else None,
        unit=entry.get("unit", ""),
        source="",
    )


class Costs(TypedDict):
    """The keys of `Summary` that a stage's telemetry measures. Those of a GPU are None on a CPU."""

    tokens_per_second: float | None
    phase_seconds: dict[str, float]
    peak_vram_bytes: int | None  # allocated by torch
    phase_peak_bytes: dict[str, int] | None
    reserved_vram_bytes: int | None  # held by torch's allocator
    used_vram_bytes: int | None  # of the card, by all processes and the driver
    phase_joules: dict[str, int] | None  # None also where the card does not count energy
    peak_rss_bytes: int
    component_bytes: dict[str, int] | None  # base, adapters and optimizer states
    peak_over_loaded_bytes: int | None  # peak above what the loaded models take


class Summary(Record):
    """The content of summary.json, its keys in the order of the file. A key with a default was added later."""

    schema_: int = Field(default=SCHEMA, alias="schema", ge=1, le=SCHEMA)
    recipe: str
    version: str
    recipe_sha256: str
    released_sha256: str | None = None  # of the released file, if the recipe's was edited since
    modified: bool
    stage: StageName
    status: Literal["done"]
    seed: Count
    device: str  # its name
    processes: Count = 1
    wall_seconds: Amount
    predicted_peak_vram_bytes: Amount | None = None
    projected_hours: Amount | None = None
    # -- `Costs` explains these
    tokens_per_second: Amount | None
    phase_seconds: dict[str, Amount] = {}
    peak_vram_bytes: Amount | None
    phase_peak_bytes: dict[str, Count] | None = None
    reserved_vram_bytes: Amount | None = None
    used_vram_bytes: Amount | None = None
    phase_joules: dict[str, Count] | None = None
    peak_rss_bytes: Amount
    component_bytes: dict[str, Count] | None = None
    peak_over_loaded_bytes: int | None = None
    # --
    data_sha256: str | None  # of the data that the stage read, if any
    result_sha256: Hashes
    metrics: dict[str, Number | None]
    findings: list[str] | None = None  # None in summaries older than the checks
    targets: list[AsRead[Comparison]]
    all_stages: list[ShortFigure] = []

    def content(self) -> dict[str, Any]:
        """Return the object for the file, with all keys."""
        return self.model_dump(by_alias=True)

    @property
    def spent(self) -> Spent:
        """Return the cost of the stage."""
        peak = self.peak_vram_bytes
        return Spent(peak / GB if peak else None, self.wall_seconds / 3600, self.processes)


class Checkpoint(Record):
    """The content of checkpoint.json, which is written last into a checkpoint's folder."""

    step: Count
    wall_seconds: Amount
    sha256: Annotated[Hashes, Field(min_length=1)]
    log_lines: dict[Name, Count] | None = None  # lines of each log at the checkpoint; older ones lack it


class Generated(Record):
    """The content of made.json beside generated data: the hash of each file."""

    sha256: Hashes


# -- lines of logs ---------------------------------------------------------------------------------------------------


class LogLine(Record):
    """A line of any log."""

    step: Count


class MetricsLine(LogLine):
    """A line of metrics.jsonl."""

    __pydantic_extra__: dict[str, Number | None]

    @property
    def values(self) -> Mapping[str, float | None]:
        """Return the logged values by key; None for one that was not finite."""
        return self.__pydantic_extra__


class TelemetryLine(LogLine):
    """A line of telemetry.jsonl."""

    memory_bytes: Amount | None = None


class FindingLine(LogLine):
    """A line of findings.jsonl."""

    check: str
    seen: str
    cause: str
    remedies: dict[str, object]
