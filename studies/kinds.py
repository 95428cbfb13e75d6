"""The kinds of records that studies keep beside themselves: keys with their units, as in `bench.kinds`."""

from typing import NotRequired

from typing_extensions import TypedDict  # comes with pydantic, which checks typing's own only from Python 3.12 on

from bench.kinds import OfRecipe, Overrides, Traced

# -- python -m studies.layers ------------------------------------------------------------------------------------------


class CurvePoint(TypedDict):
    """An evaluation during PPO, on the validation rows."""

    step: int
    seconds: float  # CPU seconds of the training steps so far, evaluations left out
    gain: float  # true reward, standard deviations of SFT's samples
    kl: float  # nats per token


class LayersRun(TypedDict):
    """What one seed's chain cost and learned."""

    stage_cpu_seconds: dict[str, float]  # of the whole process: loading and evaluation included
    reward_model_accuracy: float
    phase_cpu_seconds: dict[str, float]
    ppo: dict[str, float]
    curve: list[CurvePoint]


class LayersMeans(TypedDict):
    """Means over the seeds of one choice of layers."""

    true_gain: float  # standard deviations of SFT's samples
    true_gain_range: list[float]
    kl_per_token: float  # nats
    step_cpu_seconds: float
    chain_cpu_seconds: float
    curve: list[CurvePoint]
    seconds_to_gain: dict[str, float | None]  # gain -> CPU seconds of steps; None where it is not reached


class ChainProvenance(OfRecipe):
    """What the chains of a study ran with."""

    date: str  # ISO 8601
    packages: dict[str, str]
    command: str


class LayersRecord(ChainProvenance):
    """A record of `python -m studies.layers`."""

    adapters_in: dict[str, dict[str, LayersRun]]  # choice of layers -> seed -> run
    summary: dict[str, LayersMeans]


# -- python -m studies.experiments -------------------------------------------------------------------------------------


class ExperimentRun(TypedDict):
    """What is read of one arm on one seed."""

    figures: dict[str, float | None]  # in the units that their titles name; None where nothing was logged
    cpu_seconds: float  # of the steps and evaluations of its own stages
    ended: NotRequired[str]  # why a stage ended before its end


class ExperimentRecord(ChainProvenance):
    """A record of `python -m studies.experiments`."""

    arms: dict[str, Overrides]  # what each changes in the recipe
    runs: dict[str, dict[str, ExperimentRun]]  # arm -> seed -> run


# -- python -m studies.overoptimisation --------------------------------------------------------------------------------


class OptimisedPoint(TypedDict):
    """A point of a curve: how far a policy is from SFT, and what it gained, in standard deviations of SFT's answers."""

    number: int  # n of best-of-n, or the step of PPO
    kl: float  # nats per answer
    proxy: float  # the score that was optimised
    truth: float  # the true reward, with the ends of its 95 % interval over prompts
    truth_low: float
    truth_high: float
    utility: float  # what the annotator, who labelled the pairs, values


class BestOfN(TypedDict):
    """SFT's answers, and what the best of n of them come to."""

    sft_truth: float  # mean true reward
    sft_sd: dict[str, float]  # standard deviation of what each judge says
    best_of_n: dict[str, list[OptimisedPoint]]


class OveroptimisationRun(BestOfN):
    """What one seed's runs came to."""

    accuracy: dict[str, float]  # of reward models, on held-out pairs without flipped labels
    ppo: dict[str, list[OptimisedPoint]]


class Fitted(TypedDict):
    """The two coefficients of a fitted form, and the root mean square of its residuals, all in standard deviations."""

    alpha: float
    beta: float
    residual: float


class OveroptimisationRecord(ChainProvenance):
    """A record of `python -m studies.overoptimisation`."""

    seeds: dict[str, OveroptimisationRun]


# -- python -m studies.outside -----------------------------------------------------------------------------------------


class Source(TypedDict):
    """Where measured figures of other people come from."""

    repository: str
    commit: str
    path: str
    licence: str
    unit: str
    hardware: str


class RunsSource(Source):
    """The source of PEFT's comparison."""

    model: str


class PackedSource(Source):
    """The source of fms-acceleration's runs."""

    settings: str
    versions: dict[str, str]


class TimedStep(TypedDict):
    """What a step computes, moves and launches as counted, and the seconds that it took as measured."""

    flops: float
    moved: float  # bytes
    launched: float  # operations
    seconds_measured: float  # wall


class Parameters(TypedDict):
    """Numbers of trainable parameters."""

    measured: int
    predicted: int


class OutsideRow(TypedDict):
    """A run of PEFT's comparison in bytes by size; `failed` says why one has no prediction."""

    name: str
    file: str
    measured: dict[str, int]
    failed: NotRequired[str]
    predicted: NotRequired[dict[str, int]]
    error: NotRequired[dict[str, float]]  # predicted / measured - 1
    trainable_parameters: NotRequired[Parameters]
    sizes_exact: NotRequired[bool]  # whether polynomials in the length give the recorded bytes
    step: NotRequired[TimedStep]


class PackedRow(TypedDict):
    """A run of fms-acceleration in bytes by size."""

    name: str
    measured: dict[str, int]
    predicted: dict[str, int]
    error: dict[str, float]  # predicted / measured - 1
    step: TimedStep


class Calibrated(TypedDict):
    """The two numbers that are fitted to one run."""

    shape: float  # of the gamma distribution of lengths
    longest: int  # tokens


class OutsideRecord(Traced):
    """A record of `python -m studies.outside`."""

    outside: RunsSource
    calibrated_on: str
    calibrated: Calibrated
    packages: dict[str, str]
    rows: list[OutsideRow]
    packed_source: PackedSource
    packed: list[PackedRow]


class OpenPrediction(TypedDict):
    """What is predicted for a setting of the open T4 runs, when, and by which commit."""

    predicted: str  # ISO 8601
    commit: str
    figures: dict[str, float]


class OpenPredictions(TypedDict):
    """The content of open-t4.json."""

    unit: str
    runs: dict[str, OpenPrediction]  # by a setting's name
