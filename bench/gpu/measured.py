"""What the items of the GPU benchmark measure: the key `measured` of their records, with units.

Seconds are the wall's. An item fills its keys one by one, so that one that was cut off has only the first; nothing
here needs a GPU or torch. Where a variant is refused or fails, a text with the error stands in place of its figures.
"""

from typing import Any, NotRequired

from typing_extensions import TypedDict

from bench.kinds import Ceilings, Spread, StageSteps
from rlhf.recipe import StageName


class DeviceFigures(TypedDict, total=False):
    """The card, its driver and packages, and its rates (machine:device)."""

    other_packages: list[str]  # a line for each required package that is missing or of another version
    without: list[str]  # a line for each optional package that is missing
    capability: list[int]  # compute capability, major and minor
    multiprocessors: int
    l2_bytes: int | None
    cudnn: int | None
    cudnn_attention: bool
    smi: str | None  # driver, clocks, power limit and ECC by nvidia-smi; None where it cannot be run
    ceilings: Ceilings


class SuiteFigures(TypedDict, total=False):
    """Outcome of each test (passed, skipped, failure, error), and the messages of those that failed (suites)."""

    tests: dict[str, str]
    messages: dict[str, str]


class DecodingTime(TypedDict):
    """Seconds of a decoding step and of a prefill over all rollouts but the first."""

    first_step_seconds: float  # of a step in the first rollout, captures included
    bytes_read: NotRequired[int]  # that a step must read; once in the table of rows in records from before the key
    step_seconds: NotRequired[Spread]
    kernels: NotRequired[int]  # that the GPU runs in a captured step, copies included, by torch's profiler
    replay_seconds: NotRequired[Spread]  # of a captured step alone, where steps are captured
    prefill_seconds: NotRequired[Spread]
    outside_seconds: NotRequired[Spread]  # of a rollout, in neither: weights are merged or cast, numbers drawn
    mbu: NotRequired[float]  # bytes to read over the median step, over the rate of a large copy


class DecodingRows(TypedDict):
    """A number of rows: the time of each variant."""

    variants: dict[str, DecodingTime | str]


class DecodingFigures(TypedDict, total=False):
    """Decoding steps by number of rows (decoding:measure)."""

    bandwidth: float  # bytes per second of a large copy
    prompt: int  # tokens
    response: int  # tokens
    rows: dict[str, DecodingRows]


class MicroBatchTime(TypedDict):
    """Seconds of a micro-batch over all rounds."""

    seconds: Spread  # forward and backward pass, until the device is done
    host_seconds: Spread  # until the host has queued the same passes of one row of a few tokens
    scoring_seconds: Spread  # a forward pass without gradients
    operations: int  # floating-point, without 4-bit products
    peak_bytes: int | None
    mfu: float


class MicroBatch(TypedDict):
    """A stage's micro-batch: its size and the time of each variant."""

    rows: int
    length: int  # tokens
    variants: dict[str, MicroBatchTime | str]


class TrainingFigures(TypedDict, total=False):
    """Micro-batches by stage, and a role switch (training:measure)."""

    flops: float  # operations per second of a large product
    switch_ms: float  # the median
    micro_batches: dict[str, MicroBatch]


class PhasePeaks(TypedDict):
    """A phase's peaks in bytes; with a prediction also that and its error."""

    stage: StageName
    phase: str
    measured_bytes: int
    reserved_bytes: int | None
    predicted_bytes: NotRequired[int]
    error: NotRequired[float]  # predicted / measured - 1


class DidNotFit(TypedDict):
    """A stage that ran out of memory, and torch's message."""

    stage: StageName
    error: str


class MemoryFigures(TypedDict, total=False):
    """Peaks of every phase beside predicted.json (memory:measure)."""

    phases: list[PhasePeaks]
    unmatched: list[str]  # a line for each phase that is only predicted or only measured
    out_of_memory: list[DidNotFit]


class SpeedFigures(TypedDict, total=False):
    """Real steps of stages; MFU, MBU, hours and roofline once they are predicted (speed:measure)."""

    shape: str  # of rows: hh or longest
    ceilings: Ceilings
    stages: dict[StageName, StageSteps]


# Function of an item (`GpuItem.function`) -> what it measures.
ITEM_FIGURES: dict[str, Any] = {
    "machine:device": DeviceFigures,
    "suites:measure": SuiteFigures,
    "decoding:measure": DecodingFigures,
    "training:measure": TrainingFigures,
    "memory:measure": MemoryFigures,
    "speed:measure": SpeedFigures,
}
