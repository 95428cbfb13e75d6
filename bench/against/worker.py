"""One side of a comparison: a process that runs stages with the code of a checkout, and says what they cost.

It is started as a file, `python -P bench/against/worker.py RECIPE CHANGES STEPS SHAPE`, in the checkout that it
measures; CHANGES are those of the recipe, as JSON. The checkout may be older than this file, which therefore uses only
torch, peakmem's `Tracker`, and what has changed little in `rlhf`: the command line, the names of the blocks by which
`torch.profiler.record_function` marks phases, `few_steps`, which shortens the stages, and `Predictor`.

It reads questions, one JSON object a line: {"stage": NAME, "out": FOLDER, "count": BOOL}, or {"predict": FOLDER} with a
card's recipe. It answers each with a line, {"cost": ...}, {"predicted": ...} or {"error": MESSAGE}, whose parts
bench/against/sides.py describes. The first line that it writes names the checkout whose code it runs.
"""

import gc
import json
import os
import resource
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch

if not find_spec("peakmem"):  # an older checkout has none
    sys.path.append(str(Path(__file__).parents[2]))
from peakmem import Tracker

NEW, OLD = "rlhf.plan", "rlhf.memory"  # predictions are in one or the other: an older checkout has the latter
PLAN = NEW if find_spec(NEW) else OLD
MEASURED_PHASES = (
    "load",
    "evaluate",
    "references",
    "train",
    "rollout",
    "prefill",
    "decode",
    "score",
    "update",
    "merge",
)
OPTIMIZER_STEP = "Optimizer.step#"  # how torch names the block of an optimizer's step
TRAIN, UPDATE = "train", "update"  # phases: of all steps of a stage, and of one step, in which optimizers take several
ENTER_BLOCK = torch.ops.profiler._record_function_enter_new.default


class Clock:
    """CPU and wall seconds of each phase, by its path. One inside another counts for both."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._open: list[tuple[str, float, float]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Take the time of every block of `record_function` that is a phase."""
        block = torch.profiler.record_function
        enter, leave = block.__enter__, block.__exit__

        def enter_timed(this: Any) -> Any:
            if this.name in MEASURED_PHASES:
                self._open.append((this.name, time.process_time(), time.perf_counter()))
            return enter(this)  # type: ignore[no-untyped-call]

        def leave_timed(this: Any, *problem: Any) -> Any:
            left = leave(this, *problem)
            if this.name in MEASURED_PHASES:
                path = "/".join(name for name, *_ in self._open)
                _, cpu, wall = self._open.pop()
                self.seconds[path][0] += time.process_time() - cpu
                self.seconds[path][1] += time.perf_counter() - wall
            return left

        block.__enter__, block.__exit__ = enter_timed, leave_timed  # type: ignore[method-assign]  # undone below
        try:
            yield
        finally:
            block.__enter__, block.__exit__ = enter, leave  # type: ignore[method-assign]


class Counter(Tracker):
    """Counts what torch's operations compute, move, launch and hold in each phase, and how often the host reads.

    A count is the same in every run of the same code, however busy the machine is. `held` has the bytes that were alive
    before each step of training: before its optimizer's step, or the first of an update's.
    """

    def __init__(self) -> None:
        super().__init__("cpu", MEASURED_PHASES, vocab_size=0)
        self.held: list[int] = []
        self._reads: dict[str, int] = defaultdict(int)  # by the path of a phase
        self._update_began = False  # and its optimizer took no step yet

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ENTER_BLOCK:
            self._note_step(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Execute one operation, and count it if the host reads its result."""
        self._reads["/".join(self.phase)] += torch.Tag.data_dependent_output in func.tags
        return super().run(func, args, kwargs)

    def _note_step(self, entered: str) -> None:
        if entered.startswith(OPTIMIZER_STEP) and (self._update_began or TRAIN in self.phase):
            gc.collect()  # what only a cycle keeps is garbage that Python has not collected yet
            self.held.append(sum(event.bytes for event in self.events_since(0)))
            self._update_began = False
        self._update_began |= entered == UPDATE

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the counts of each phase by its path; "" is the whole stage."""
        return {
            path: {
                "flops": peak.work.flops,
                "moved": peak.work.moved,
                "launched": peak.work.launched,
                "reads": sum(n for name, n in self._reads.items() if not path or f"{name}/".startswith(f"{path}/")),
                "peak_bytes": peak.bytes,
            }
            for path, peak in self.peaks().items()
        }


def cost(run_stage: Callable[[], None], folder: Path, count: bool) -> dict[str, Any]:
    """Run a stage. Return what it cost: counted or timed, because counting takes time."""
    gc.collect()
    counter = Counter() if count else None
    clock = Clock()
    cpu, wall = time.process_time(), time.perf_counter()
    with clock.running(), counter or nullcontext():
        run_stage()
    clock.seconds[""] = [time.process_time() - cpu, time.perf_counter() - wall]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "seconds": {path: {"cpu": cpu, "wall": wall} for path, (cpu, wall) in clock.seconds.items()},
        "counts": counter.counts() if counter else {},
        "held": counter.held if counter else [],
        "tokens": tokens(folder / "telemetry.jsonl"),
        "card_peak_bytes": summary.get("phase_peak_bytes") or {},
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def tokens(file: Path) -> int:
    """Return the tokens of a stage's steps; 0 of a stage that takes none."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return sum(json.loads(line).get("tokens", 0) for line in lines)


def prediction(recipe: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Return what is predicted for the stages of a card's recipe and their phases."""
    from rlhf import recipe as recipes

    predict = import_module(f"{PLAN}.predict")
    Predictor, predicted_stages = predict.Predictor, predict.predicted_stages

    loaded = recipes.load(recipe)
    with Predictor() as predictor:
        return {
            stage: {
                name: {
                    "flops": phase.work.flops,
                    "moved": phase.work.moved,
                    "launched": phase.work.launched,
                    "peak_bytes": phase.peak_bytes,
                }
                for name, phase in predictor.predict(loaded, stage).phases.items()
            }
            for stage in predicted_stages(loaded.recipe)
        }


def main() -> None:
    """Answer questions until there are no more."""
    recipe, given, steps, shape = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever a stage prints shall not stand between the answers
    os.environ["HF_HUB_OFFLINE"] = "1"
    import rlhf
    from rlhf import recipe as recipes
    from rlhf.cli import cli

    few_steps = import_module(f"{PLAN}.rehearsal.short_runs").few_steps

    def run(arguments: list[str]) -> None:
        cli.main(arguments, standalone_mode=False)

    loaded = recipes.load(recipe, given)
    changes = loaded.with_changes(few_steps(loaded.recipe, steps, cast(Any, shape))).overrides
    sets = [part for key, value in changes.items() for part in ("--set", f"{key}={recipes.as_yaml(value)}")]
    print(json.dumps({"root": str(Path(rlhf.__file__).parents[1])}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if "predict" in question:
                answer: dict[str, Any] = {"predicted": prediction(Path(question["predict"]))}
            else:
                arguments = ["run", question["stage"], "--recipe", str(recipe), "--out", question["out"]]
                folder = Path(question["out"], loaded.name, loaded.version, question["stage"])
                answer = {"cost": cost(partial(run, [*arguments, "--no-preflight", *sets]), folder, question["count"])}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
