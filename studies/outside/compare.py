"""Each run of PEFT's comparison predicted, and held against what was measured."""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean, median
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from peakmem.depth import NotAligned, deepen
from peakmem.events import DEPTHS
from studies.kinds import OutsideRow, PackedRow, TimedStep
from studies.outside import collect, lengths
from studies.outside.collect import PeftRun
from studies.outside.collect_fms import PackedRun, packed_runs

if TYPE_CHECKING:
    from studies.outside.steps import Recorded

Size = Literal["reserved_max", "reserved_average", "allocated_average"]

RECORDED = (301, 301, 311, 353, 421, 501, 609, 641)  # tokens; the first steps differ from the others
WEIGHTS = 3_212_749_824 * 2  # bytes of the checkpoint
SUBTRACTED = 2 << 20  # bytes that utils.py takes off: what was reserved before the model came
SECONDS = 600  # of a processor for one rehearsal, far above what any takes: one that never ends is given up
LONGEST_WINDOWS, BEFORE, SAMPLED = 3, 6, 10
# Methods that are not rehearsed, and why. Implementations were compared by their source files.
RUNS_LEFT_OUT = {
    "OSF": "the run's peft keeps the large factors of each weight on the card, 0.21 does not",
    "FROD": "its decomposition of every weight on the CPU took more than 60 s",
    "ADAMSS": "it clusters the values of weights, which a rehearsal does not have",
}
VIRTUAL = ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING")  # put tokens of their own before each row
STEPS = 5000
SIZES: tuple[Size, ...] = ("reserved_max", "reserved_average", "allocated_average")


def runs(only: str = "") -> list[PeftRun]:
    """Return the measured runs whose name contains `only`."""
    return [run for run in collect.runs()["runs"] if only in name(run)]


def name(run: PeftRun) -> str:
    """Return a run's method and settings as one name: `lora--rank32`."""
    return run["file"].removeprefix("results/").removesuffix(".json").replace("llama-3.2-3B-", "")


def predict(run: PeftRun) -> OutsideRow:
    """Return the predicted bytes in the comparison's sizes, and what was counted; `failed` says why there are none."""
    from studies.outside import steps

    measured: dict[str, int] = {size: run["measured"][size] for size in SIZES}
    row: OutsideRow = {"name": name(run), "file": run["file"], "measured": measured}
    method = run["adapter"].get("peft_type")
    virtual = run["adapter"]["num_virtual_tokens"] if method in VIRTUAL else 0
    if reason := RUNS_LEFT_OUT.get(method or ""):
        return failed(row, reason)
    try:
        with _limited(SECONDS):
            recording, counted, work = _recorded(run, virtual)
    except Exception as error:
        return failed(row, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    if counted != run["trainable_parameters"]:
        return failed(row, f"{counted:,} trainable parameters, the run has {run['trainable_parameters']:,}")
    chosen, sampled = _windows()
    usage = steps.simulate(recording, lengths.windows()[chosen], WEIGHTS, virtual)
    held = {
        "reserved_max": usage.reserved_most.max(),
        "reserved_average": usage.reserved[sampled].mean(),
        "allocated_average": usage.allocated[sampled].mean(),
    }
    predicted = {size: round(value) - SUBTRACTED for size, value in held.items()}
    row["predicted"] = predicted
    row["error"] = {size: predicted[size] / measured[size] - 1 for size in SIZES}
    row["trainable_parameters"] = {"measured": run["trainable_parameters"], "predicted": counted}
    row["sizes_exact"] = recording.step.exact
    row["step"] = _work_of_a_step(work, run["measured"]["seconds"] / STEPS)
    return row


def failed(row: OutsideRow, why: str) -> OutsideRow:
    """Return a row without a prediction, with the reason."""
    row["failed"] = why
    return row


def _recorded(run: PeftRun, virtual: int) -> tuple["Recorded", int, np.ndarray]:
    """Return the run's steps at its depth, its trainable parameters, and the work of each step.

    They follow from 2 and 4 layers, or from all layers where two more do not add the same to every step.
    """
    from studies.outside import loop, steps

    few, more = (loop.rehearse(run, n, RECORDED) for n in DEPTHS)
    repeats = (loop.LAYERS - DEPTHS[0]) // (DEPTHS[1] - DEPTHS[0])
    try:
        recording = steps.recorded(deepen(few.events, more.events, loop.LAYERS).events, RECORDED, virtual)
        trainable = few.trainable + repeats * (more.trainable - few.trainable)
        return recording, trainable, few.work + repeats * (more.work - few.work)
    except (NotAligned, ValueError):  # of the two depths, and of the steps
        whole = loop.rehearse(run, loop.LAYERS, RECORDED)
        return steps.recorded(whole.events, RECORDED, virtual), whole.trainable, whole.work


def _work_of_a_step(work: np.ndarray, seconds: float) -> TimedStep:
    """Return the mean work of a step over the run, and the `seconds` that one took.

    Each count is a polynomial of second degree in a batch's length.
    """
    every = lengths.windows().ravel()
    means = np.array([np.mean(every**power) for power in (2.0, 1.0, 0.0)])
    counts = np.polyfit(RECORDED[1:], work[1:], 2).T @ means  # the first step makes the optimizer's states
    flops, moved, launched = counts.tolist()
    return {"flops": flops, "moved": moved, "launched": launched, "seconds_measured": seconds}


def _windows() -> tuple[np.ndarray, list[int]]:
    """Return the windows that are replayed, in their order, and which of them make the averages.

    Those with the longest rows, each after those before it, since what they leave behind matters; and pairs that are
    spread over the run. The 117 up to the longest row give LoRA's maximum to the MiB, as the last seven of them do.
    """
    every = lengths.windows()
    longest = np.argsort(-every.max(1), kind="stable")[:LONGEST_WINDOWS]
    around = {at for top in longest.tolist() for at in range(max(0, top - BEFORE), top + 1)}
    pairs = {at + side for at in range(8, len(every) - 1, len(every) // SAMPLED) for side in (0, 1)}
    chosen = sorted(around | pairs)
    return np.array(chosen), [place for place, at in enumerate(chosen) if at in pairs]


def predict_all(chosen: Sequence[PeftRun], jobs: int) -> Iterator[OutsideRow]:
    """Yield each run's prediction, in order; `jobs` processes work side by side."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        yield from pool.map(predict, chosen)


def predict_packed(jobs: int) -> Iterator[PackedRow]:
    """Yield predictions of fms-acceleration's runs, in order."""
    chosen = packed_runs()["runs"]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        yield from pool.map(_packed, chosen)


def _packed(run: PackedRun) -> PackedRow:
    from studies.outside import packed

    return packed.predict(run)


def _quiet() -> None:
    """Silence the libraries, which warn about what meta tensors lack."""
    import warnings

    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class _limited:
    """Raise TimeoutError in the block after this many CPU seconds."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __enter__(self) -> None:
        signal.signal(signal.SIGPROF, self._end)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)

    def __exit__(self, *problem: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _end(self, *_: object) -> None:
        raise TimeoutError(f"more than {self.seconds:.0f} s")


class Errors(NamedTuple):
    """Absolute errors of a size, as shares of the measured one."""

    runs: int
    median: float
    mean: float
    worst: float


def summary(rows: Sequence[OutsideRow | PackedRow], size: str) -> Errors:
    """Return the errors of a size over the predicted rows, without the calibrated one."""
    errors = [abs(row["error"][size]) for row in rows if "error" in row and row.get("file") != lengths.CALIBRATED_ON]
    return Errors(len(errors), median(errors), mean(errors), max(errors))
