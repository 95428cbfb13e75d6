"""Predictions for a program as it is: it runs in processes of its own, once to see its model, or with few layers."""

import importlib.metadata
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from peakmem import cards, report
from peakmem.batches import Batches
from peakmem.events import Crashed, NotPredicted, ProgramFailed
from peakmem.script import Record
from peakmem.stacks import Stack

BATCHES = 2000  # that are read at most
SCRATCH = 2**30  # bytes of a folder that is copied, at most
MOST = 2**20  # of an argument that is fitted


@dataclass(frozen=True)
class Run:
    """A program with its arguments, and how it is followed.

    `card` is a name or a size as `cards.named` takes it; without one nothing is decided. `steps` optimizer steps are
    run, `batches` are read at most, and the largest is run with rows of `longest` tokens if that is given. `full` runs
    all layers. `scratch` runs the program in a copy of the current folder, afresh each time.
    """

    program: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    card: str | None = None
    steps: int = 2
    batches: int = BATCHES
    longest: int | None = None
    full: bool = False
    scratch: bool = False


def predict(
    program: str,
    *arguments: str,
    card: str | None = None,
    steps: int = 2,
    batches: int = BATCHES,
    longest: int | None = None,
    full: bool = False,
    scratch: bool = False,
    module: bool = False,
) -> report.Prediction:
    """Return what is predicted for `program` (a file, a console script, or with `module` a module).

    The program really runs, on the host: what it writes is written. Raises ValueError for an unknown card, and
    NotPredicted, ProgramFailed or Crashed with one line that says why there is no prediction.
    """
    return predict_run(Run(program, arguments, module, card, steps, batches, longest, full, scratch))


def fit(argument: str, run: Run) -> tuple[int, report.Prediction | None]:
    """Return the largest value of a program's option, such as `batch_size`, with which it fits the card: 0 if none.

    Values are doubled from 1, until one does not fit or changes nothing, then halved in between; each takes a whole
    prediction. Raises as `predict` does.
    """
    if run.card is None:
        raise NotPredicted("--fit needs a card: name one with --card")
    tried: dict[int, report.Prediction] = {}

    def fits_with(value: int) -> bool:
        found = tried[value] = predict_run(replace(run, arguments=with_value(run.arguments, argument, value)))
        _say(f"{argument} {value}: {found.verdict}, {found.needed / 2**30:.2f} GiB")
        return found.fits is True

    low, high = 0, 1
    while high <= MOST and fits_with(high):
        if low and _extent(tried[high]) == _extent(tried[low]):
            _say(f"{argument} {high} takes no more than {low}: rows or other options bound it, or it is not read")
            return high, tried[high]
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if fits_with(middle):
            low = middle
        else:
            high = middle
    return low, tried.get(low)


def _extent(found: report.Prediction) -> tuple[int, int]:
    """Return what is allocated at the peak, and the largest batch; without a DataLoader all bytes of the steps."""
    seen, events = found.record.seen, found.record.events
    return found.allocated, seen.numbers if seen else sum(event.bytes for event in events if event.bytes > 0)


def with_value(arguments: tuple[str, ...], name: str, value: int) -> tuple[str, ...]:
    """Return arguments in which an option has a value: in its place as `--name VALUE` or `--name=VALUE`, or at the end.

    A name without dashes gets two; `learning.batch=` style words are matched as they are.
    """
    option = name if name.startswith("-") or "." in name else f"--{name}"
    for place, word in enumerate(arguments):
        if word == option:
            return (*arguments[: place + 1], str(value), *arguments[place + 2 :])
        if word.startswith(f"{option}="):
            return (*arguments[:place], f"{option}={value}", *arguments[place + 1 :])
    return (*arguments, option, str(value))


def predict_run(run: Run) -> report.Prediction:
    """Run a program, once or with two depths, and return what is predicted. Raises as `predict` does."""
    _check_program(run.program, run.module)
    card = cards.named(run.card) if run.card else cards.ANY
    with tempfile.TemporaryDirectory(prefix="peakmem-") as folder:
        _say(f"{run.program}: running it for {card.words}; it really runs, and what it prints has no real numbers")
        whole = _Process(run, card, Path(folder, "whole"), None, 0, not run.full).result()
        if whole.ended != "probed" or whole.stack is None:
            return report.of_run(card, whole)
        stack = whole.stack
        low, high = stack.depths
        _say(f"a stack of {stack.layers} equal layers ({stack.layer}): running it with {low} and {high}")
        started = [_Process(run, card, Path(folder, str(n)), stack, n, False) for n in stack.depths]
        shallow, deeper = (process.result() for process in started)
        return report.of_depths(card, shallow, deeper)


def _copy_to(folder: Path) -> Path:
    """Copy the current folder. Raises NotPredicted for one that is too large."""
    here = Path.cwd()
    size = sum(file.stat().st_size for file in here.rglob("*") if file.is_file() and not file.is_symlink())
    if size > SCRATCH:
        raise NotPredicted(f"--scratch: {here} has {size / 2**30:.1f} GiB, and at most 1 GiB is copied")
    return Path(shutil.copytree(here, folder, symlinks=True))


def _check_program(program: str, module: bool) -> None:
    """Raise NotPredicted where there is no such file, command of a package, or module."""
    if module:
        sys.path.insert(0, os.getcwd())  # as `python -m` looks for it
        if importlib.util.find_spec(program.partition(".")[0]) is None:
            raise NotPredicted(f"-m {program}: there is no module of that name")
    elif not (Path(program).is_file() or importlib.metadata.entry_points(group="console_scripts", name=program)):
        raise NotPredicted(f"{program}: no such file, and no package has a command of that name")


class _Process:
    """The program in a process of its own, whose output goes to stderr; that of a shortened model only if it fails.

    With `scratch` each has a copy of its own, in which no other process has written.
    """

    def __init__(self, run: Run, card: cards.Card, into: Path, stack: Stack | None, layers: int, probing: bool):
        self._run, self._into, self._layers = run, into, layers
        into.with_suffix(".task").write_bytes(pickle.dumps((run, card, stack, layers, probing)))
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "peakmem.predicting", str(into)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=_copy_to(into.with_suffix(".scratch")) if run.scratch else None,
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )
        self._said = b""
        self._reading = threading.Thread(target=self._read, daemon=True)  # what the program started may never end
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout
        for said in iter(lambda: os.read(self._process.stdout.fileno(), 2**16), b""):  # type: ignore[union-attr]
            self._said += said
            if not self._layers:
                _write(said)

    def result(self) -> Record:
        """Return what was recorded, when the process has ended. Raises NotPredicted, ProgramFailed or Crashed."""
        code = self._process.wait()
        self._reading.join(timeout=1)
        record: Record | None = pickle.loads(self._into.read_bytes()) if self._into.exists() else None
        bad = record is None or record.failed or record.crashed
        if self._layers and bad:
            _write(self._said)
        if (self._said or b"\n")[-1:] != b"\n" and (not self._layers or bad):
            _write(b"\n")  # after a bar of progress
        if record is None:
            raise ProgramFailed(f"{self._run.program} ended with {code} before its first steps were done")
        if record.crashed:
            raise Crashed(f"a fault of peakmem, not of {self._run.program}: {record.crashed}; please report it")
        if record.failed:
            few = "; --full runs all its layers" if self._layers else ""
            raise ProgramFailed(f"{self._run.program} ended before its first steps were done: {record.failed}{few}")
        if record.refused:
            raise NotPredicted(record.refused)
        return record


def _write(said: bytes) -> None:
    sys.stderr.buffer.write(said)
    sys.stderr.flush()


def _say(text: str) -> None:
    print(f"peakmem: {text}", file=sys.stderr, flush=True)


def _keeping(into: Path) -> Callable[[Record], NoReturn]:
    def keep(record: Record) -> NoReturn:
        into.write_bytes(pickle.dumps(record))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # whatever the program would still do

    return keep


def _follow(into: Path) -> NoReturn:
    """Run the program in this process, and write what was recorded."""
    from peakmem.script import Followed, follow

    run, card, stack, layers, probing = pickle.loads(into.with_suffix(".task").read_bytes())
    batches = Batches(run.batches, run.longest, into.with_name("batches"))
    followed = Followed(card, run.steps, stack, layers, probing, _keeping(into), batches)
    follow([run.program, *run.arguments], run.module, followed)


if __name__ == "__main__":
    # By its package's name: what is pickled here is read by another process.
    from peakmem import predicting

    predicting._follow(Path(sys.argv[1]))
