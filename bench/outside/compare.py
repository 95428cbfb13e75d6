"""Each run of PEFT's comparison predicted, and held against what was measured."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean, median
from typing import Any

import numpy as np

from bench.outside import lengths
from bench.outside.collect import DATA
from bench.outside.collect_fms import DATA as PACKED_DATA
from rlhf.memory.depth import deepen
from rlhf.memory.phases import DEPTHS

RECORDED = (301, 301, 311, 353, 421, 501, 609, 641)  # tokens; the first steps differ from the others
WEIGHTS = 3_212_749_824 * 2  # bytes of the checkpoint
SUBTRACTED = 2 << 20  # bytes that utils.py takes off: what was reserved before the model came
SECONDS = 60  # of a processor for one rehearsal; one that takes longer is given up
LONGEST_WINDOWS, BEFORE, SAMPLED = 3, 6, 10
# Methods that are not rehearsed, and why. Implementations were compared by their source files.
LEFT_OUT = {
    "OSF": "the run's peft keeps the large factors of each weight on the card, 0.21 does not",
    "FROD": "its decomposition of every weight on the CPU took more than 60 s",
    "ADAMSS": "it clusters the values of weights, which a rehearsal does not have",
}
VIRTUAL = ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING")  # put tokens of their own before each row
WORK = ("flops", "moved", "launched")  # of a step: floating-point operations, bytes, operations
STEPS = 5000
SIZES = ("reserved_max", "reserved_average", "allocated_average")
Row = dict[str, Any]


def runs(only: str = "") -> list[Row]:
    """Return the measured runs whose name contains `only`."""
    measured = json.loads(DATA.read_text(encoding="utf-8"))["runs"]
    return [run for run in measured if only in name(run)]


def name(run: Row) -> str:
    """Return a run's method and settings as one name: `lora--rank32`."""
    file: str = run["file"]
    return file.removeprefix("results/").removesuffix(".json").replace("llama-3.2-3B-", "")


def predict(run: Row) -> Row:
    """Return the bytes as the comparison reports them, and what was counted on the way; `failed` says why there are
    none.
    """
    from bench.outside import steps

    row = {"name": name(run), "file": run["file"], "measured": {size: run["measured"][size] for size in SIZES}}
    virtual = run["adapter"]["num_virtual_tokens"] if run["adapter"].get("peft_type") in VIRTUAL else 0
    if reason := LEFT_OUT.get(run["adapter"].get("peft_type")):
        return row | {"failed": reason}
    try:
        with _limited(SECONDS):
            recording, counted, work = _recorded(run, virtual)
    except Exception as error:
        return row | {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    if counted != run["trainable_parameters"]:
        return row | {"failed": f"{counted:,} trainable parameters, the run has {run['trainable_parameters']:,}"}
    chosen, sampled = _windows()
    usage = steps.simulate(recording, lengths.windows()[chosen], WEIGHTS, virtual)
    predicted = {
        "reserved_max": usage.reserved_most.max(),
        "reserved_average": usage.reserved[sampled].mean(),
        "allocated_average": usage.allocated[sampled].mean(),
    }
    predicted = {size: round(value) - SUBTRACTED for size, value in predicted.items()}
    return row | {
        "predicted": predicted,
        "error": {size: predicted[size] / row["measured"][size] - 1 for size in SIZES},
        "trainable_parameters": {"measured": run["trainable_parameters"], "predicted": counted},
        "sizes_exact": recording.step.exact,
        "step": _work_of_a_step(work) | {"seconds_measured": run["measured"]["seconds"] / STEPS},
    }


def _recorded(run: Row, virtual: int) -> tuple[Any, int, np.ndarray]:
    """Return the run's steps at its depth, its trainable parameters, and the work of each step: from 2 and 4 layers, or
    from all of them where what two layers do more is not the same in every step.
    """
    from bench.outside import loop, steps

    few, more = (loop.rehearse(run, n, RECORDED) for n in DEPTHS)
    repeats = (loop.LAYERS - DEPTHS[0]) // (DEPTHS[1] - DEPTHS[0])
    try:
        recording = steps.recorded(deepen(few.events, more.events, loop.LAYERS), RECORDED, virtual)
        trainable = few.trainable + repeats * (more.trainable - few.trainable)
        return recording, trainable, few.work + repeats * (more.work - few.work)
    except ValueError:
        whole = loop.rehearse(run, loop.LAYERS, RECORDED)
        return steps.recorded(whole.events, RECORDED, virtual), whole.trainable, whole.work


def _work_of_a_step(work: np.ndarray) -> dict[str, float]:
    """Return the mean work of a step over the run: each count is a polynomial of second degree in a batch's length."""
    every = lengths.windows().ravel()
    means = np.array([np.mean(every**power) for power in (2.0, 1.0, 0.0)])
    mean_counts = np.polyfit(RECORDED[1:], work[1:], 2).T @ means  # the first step makes the optimizer's states
    return dict(zip(WORK, mean_counts.tolist(), strict=True))


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


def predict_all(chosen: Sequence[Row], jobs: int) -> Iterator[Row]:
    """Yield each run's prediction, in order; `jobs` processes work side by side."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        yield from pool.map(predict, chosen)


def predict_packed(jobs: int) -> Iterator[Row]:
    """Yield predictions of fms-acceleration's runs, in order."""
    chosen = json.loads(PACKED_DATA.read_text(encoding="utf-8"))["runs"]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_quiet) as pool:
        yield from pool.map(_packed, chosen)


def _packed(run: Row) -> Row:
    from bench.outside import packed

    return packed.predict(run)


def _quiet() -> None:
    """Send what libraries print to nowhere: they warn of what a meta tensor lacks."""
    import warnings

    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class _limited:
    """A block that may take so many seconds of the processor; TimeoutError is raised in it after that."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __enter__(self) -> None:
        signal.signal(signal.SIGPROF, self._end)
        signal.setitimer(signal.ITIMER_PROF, self.seconds)

    def __exit__(self, *problem: Any) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _end(self, *_: Any) -> None:
        raise TimeoutError(f"more than {self.seconds:.0f} s")


def summary(rows: Sequence[Row], size: str) -> dict[str, float]:
    """Return median, mean and largest error of a size over the predicted rows, without the calibrated one."""
    errors = [abs(row["error"][size]) for row in rows if "error" in row and row.get("file") != lengths.CALIBRATED_ON]
    return {"runs": len(errors), "median": median(errors), "mean": mean(errors), "worst": max(errors)}
