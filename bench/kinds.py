"""The kinds of records below results/ and the rows in them: keys with their units. `bench.reading` checks files.

Units: keys that end in `_seconds` or `_bytes` have them; `flops` are floating-point operations. Where a row has a
`clock`, its seconds are those of that clock: `cpu`, of all threads of the process, or `wall`. A key that is
NotRequired is absent where it was not measured, or in records from before it.

The record of seeds is `rlhf.run.outcomes.Reproduction`, the records of `bench.gpu` are in bench/gpu/record.py.
"""

from collections.abc import Mapping
from typing import Literal, NotRequired

from typing_extensions import TypedDict  # comes with pydantic, which checks typing's own only from Python 3.12 on

from rlhf.recipe import StageName

Clock = Literal["cpu", "wall"]
Overrides = Mapping[str, object]  # changes of a recipe: dotted key -> value


# -- where a record comes from ---------------------------------------------------------------------------------------


class Code(TypedDict):
    """The JSON of a `rlhf.run.records.Code`."""

    commit: str | None
    dirty: bool | None


class Device(TypedDict):
    """The device, as `rlhf.observe.device.device_facts` describes it. All CPUs have the name `cpu`."""

    type: str
    name: str
    model: NotRequired[str]  # of a CPU; records before 2026-11-22 lack it
    threads: NotRequired[int]  # of torch, on a CPU
    memory_bytes: NotRequired[int]  # of a GPU
    memory_cap: NotRequired[str | None]  # RLHF_VRAM_CAP
    cuda: NotRequired[str | None]
    driver: NotRequired[str | None]


class Traced(TypedDict):
    """Fields of every record: the code that made it, and the device, of which some kinds have the name only."""

    code: Code
    device: Device | str


class OfRecipe(Traced):
    """Further fields of records about a recipe."""

    recipe: str  # its name; of a study name and version
    recipe_sha256: str
    version: NotRequired[str]
    modified: NotRequired[bool]
    overrides: NotRequired[Overrides]


# -- python -m bench: key `stages` -----------------------------------------------------------------------------------


class Spread(TypedDict):
    """Median, lower and upper quartile, and number of repeated measurements."""

    median: float
    low: float
    high: float
    n: int


class Ceilings(TypedDict):
    """Measured rates of a device: of a large product in operations, of a large copy in bytes read and written."""

    flops: float  # per second
    bandwidth: float  # bytes per second
    clock: NotRequired[Clock]  # of these seconds; the wall's in records from before the key, also beside CPU seconds


class Bound(TypedDict):
    """The least seconds of a phase by the roofline, beside the measured ones."""

    least_seconds: float
    seconds: float
    reached: float  # least over measured


class StageSteps(TypedDict, total=False):
    """A stage's row: what its steps took after the warm-up. One that did not fit has `out_of_memory` and predictions.

    `bench.derived.derived_figures` adds `mfu` to `predicted_peak_bytes`, `bench.gpu.speed.conclude` adds `roofline`. A
    figure is None where it is unknown.
    """

    out_of_memory: bool
    cannot_run: str  # why, of a package that the ablation tries
    clock: Clock
    step_seconds: Spread
    round_seconds: list[float]  # median of each round, of an ablation
    phase_seconds: dict[str, Spread]
    tokens_per_step: float  # real tokens, no padding; the mean
    tokens_per_second: float
    evaluate_seconds: float | None  # wall
    peak_vram_bytes: int | None  # allocated by torch; None on a CPU
    phase_peak_bytes: dict[str, int] | None
    reserved_vram_bytes: int | None  # held by torch's allocator
    used_vram_bytes: int | None  # of the card, by all processes and the driver
    phase_joules: dict[str, float] | None
    peak_rss_bytes: int  # resident pages of the process
    growth_bytes: float  # of these pages in a step, in the half of the steps with less; on a CPU
    component_bytes: dict[str, int] | None
    adapter_bytes: int | None  # of the files
    predicted_peak_vram_bytes: int | None  # by the stage itself, before it began
    mfu: float | None  # share of the rate of a large product, 0 to 1, without recomputed operations
    hfu: float | None  # the same with them
    mbu: float | None  # of decoding: share of the rate of a large copy, 0 to 1
    hours: float | None  # of all steps by the mean one and its clock, projected; once by the median
    predicted_peak_bytes: int | None
    roofline: dict[str, Bound]  # by phase, in records of the GPU benchmark


class StepsRecord(OfRecipe):
    """A record of `python -m bench`."""

    date: str  # ISO 8601
    shape: str  # of rows: hh or longest
    steps: int  # after the warm-up
    packages: dict[str, str]
    python: str
    ceilings: Ceilings
    stages: dict[StageName, StageSteps]


# -- python -m bench.memory measure: key `phases` --------------------------------------------------------------------


class ComparedPhase(TypedDict):
    """A phase with both peaks."""

    stage: StageName
    phase: str
    predicted_bytes: int
    measured_bytes: int
    error: float  # predicted / measured - 1


class MemoryRecord(OfRecipe):
    """A record of `python -m bench.memory measure`."""

    date: NotRequired[str]  # ISO 8601; the first record has it in its file's name alone
    phases: list[ComparedPhase]
    unmatched: NotRequired[list[str]]  # a line for each phase that only one side has


# -- python -m bench.ablation: key `strategies` ----------------------------------------------------------------------


class AblationRecord(OfRecipe):
    """A record of `python -m bench.ablation`."""

    date: str  # ISO 8601
    packages: dict[str, str]
    stage: StageName
    steps: int  # after the warm-up
    rounds: int
    strategies: dict[str, StageSteps]  # the median round of each; also "none" and "combined"


# -- steps of PPO, RLOO and GRPO beside TRL until 2026-11-27, which nothing writes any more: key `figures` -------------


class Contender(TypedDict, total=False):
    """A contender's row; of one that does not fit only `out_of_memory`. Ratios are to TRL's two."""

    out_of_memory: bool
    seconds_per_step: float  # median by `clock`
    seconds_range: list[float]  # least and most
    clock: Clock
    samples_per_second: float  # by the wall
    peak_over_loaded_bytes: float  # above what the loaded models take; the median of the runs
    steps_measured: int
    seconds_by_phase: dict[str, float]  # medians of the runs' medians
    # A ratio to each of TRL's two; a SideFigures has two keys instead. Stored records fix both forms.
    times_faster: list[float]
    times_faster_range: list[list[float]]  # least and most of the ratios within a round
    memory_ratio: list[float]


class Floor(TypedDict):
    """Operations of each phase of a step, and the rate of a large product on the device."""

    contender: NotRequired[str]  # whose operations these are; records before it was named counted our first one
    flops_per_second: float
    flops_per_step: dict[str, float]


class PeerProvenance(Traced):
    """What the figures beside a peer were measured with."""

    date: str  # ISO 8601
    model: dict[str, int | str]  # sizes, dtype, weights
    method: NotRequired[str]  # records from before the key are of PPO
    batch: int  # responses of a step
    group: NotRequired[int]  # responses to a prompt
    prompt_tokens: list[int]  # least and most
    new_tokens: int
    epochs: int
    micro_batch: int  # rows
    repeats: int  # runs of each contender
    peer: str
    second_peer: NotRequired[dict[str, str]]  # package -> version
    packages: dict[str, str]  # of ours
    peer_packages: NotRequired[dict[str, str]]  # of the peer's environment, and of the second peer's
    second_peer_packages: NotRequired[dict[str, str]]


class PeerRecord(PeerProvenance):
    """A record of PPO, RLOO or GRPO beside peers."""

    figures: dict[str, Contender]
    floor: Floor


# -- python -m bench.peer: key `stages_beside` ------------------------------------------------------------------------


class SideFigures(TypedDict, total=False):
    """One contender's median over its repeats, and the range of them; of one that did not fit `out_of_memory` alone.

    Ratios are ours to TRL's two, in our rows alone: to TRL's defaults and to TRL tuned; of PPO to both value models.
    """

    out_of_memory: bool
    step_seconds: float
    step_seconds_range: list[float]
    tokens_per_second: float
    peak_bytes: float | None  # of a GPU while it trains; of the process on a CPU, where older records have None
    clock: Clock
    times_faster: float
    times_faster_range: list[float]
    times_faster_tuned: float
    times_faster_tuned_range: list[float]
    memory_ratio: float
    memory_ratio_range: list[float]
    memory_ratio_tuned: float
    memory_ratio_tuned_range: list[float]


class NamedFile(TypedDict):
    """A file by its name without folders, and its SHA-256."""

    name: str
    sha256: str


class SupervisedRecord(Traced):
    """A record of `python -m bench.peer`; the recipe is missing where the model was made up for the comparison."""

    recipe: NotRequired[str]
    version: NotRequired[str]
    recipe_sha256: NotRequired[str]
    overrides: NotRequired[Overrides]
    made_up: NotRequired[str]  # the size of the model
    date: str  # ISO 8601
    peer: str
    packages: dict[str, str]
    peer_packages: NotRequired[dict[str, dict[str, str]]]  # of environments of their own
    steps: NotRequired[int]  # of each run; missing in records from before the key
    repeats: int
    weights: NotRequired[str]  # "the recipe's"; missing where they are random
    rows: NotRequired[list[NamedFile]]  # files that were given instead of the recipe's data
    stages_beside: dict[StageName, dict[str, SideFigures]]  # ours and variants; TRL's two; others


# -- experiments with bench.against, which no command makes any more: key `planted`, or `same` ------------------------


class Worse(TypedDict):
    """A figure that the comparison called worse; `low` and `high` are of the ratio new / old, equal where it counts."""

    place: str  # stage/phase
    what: str  # as bench.against.judge names figures
    old: float
    new: float
    ratio: float
    low: float
    high: float


class PlantRow(TypedDict):
    """A planted regression, and what of it the comparison found: nothing where `worse` is empty."""

    does: str
    worse: list[Worse]
    load: float  # average of five minutes, at the end


class SameRow(TypedDict):
    """A comparison of a commit with itself: what is called worse is an alarm without a reason."""

    worse: list[Worse]
    load: float  # average of five minutes, at the end


class AgainstProvenance(OfRecipe):
    """What the experiments with `bench.against` were measured with."""

    date: str  # ISO 8601
    packages: dict[str, str]
    steps: int  # of each stage
    rounds: int  # timed pairs; what looks worse has as many again


class PlantedRecord(AgainstProvenance):
    """Regressions that were planted in copies of a commit."""

    planted: dict[str, PlantRow]


class SameRecord(AgainstProvenance):
    """A commit that was compared with itself."""

    stages_compared: list[StageName]
    same: list[SameRow]
