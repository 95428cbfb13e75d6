"""`peakmem --card 4090 train.py ARGS…`: peak memory of a program as it is, predicted without a GPU.

The program runs in processes of its own: once to see its model, and where that is a stack of many equal layers, twice
more with few of them.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from peakmem import cards, report
from peakmem.events import NotPredicted
from peakmem.script import Record
from peakmem.stacks import Stack


def main() -> None:
    """Predict, print and exit: with 0 if the program fits the card, 1 if not, 2 if nothing can be predicted."""
    options = _options(sys.argv[1:])
    if options.into:
        _follow(options)
        return
    try:
        found = predict(options)
    except NotPredicted as error:
        print(f"peakmem: {error}", file=sys.stderr)
        sys.exit(2)
    print(report.as_json(found) if options.json else report.as_text(found))
    sys.exit(0 if found.fits else 1)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="peakmem", description="Predict the peak GPU memory of a training program, without a GPU."
    )
    known = ", ".join(name for name, card in cards.CARDS.items() if card.memory)
    parser.add_argument("--card", required=True, help=f"what is stood in for: a size such as 24GB, or one of {known}")
    parser.add_argument("--steps", type=_steps, default=2, help="optimizer steps after which the run ends (default: 2)")
    parser.add_argument("--full", action="store_true", help="run all layers, instead of few that are extrapolated")
    parser.add_argument("--json", action="store_true", help="print the prediction as JSON")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module")
    parser.add_argument("--into", help=argparse.SUPPRESS)
    parser.add_argument("--stack", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--probing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("program", metavar="PROGRAM", help="a file, a console script such as trl, or a module (-m)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="of the program")
    options = parser.parse_args(arguments)
    try:
        cards.named(options.card)
    except ValueError as error:
        parser.error(f"--card: {error}")
    return options


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of optimizer steps, which is 1 or more")
    return int(text)


def predict(options: argparse.Namespace) -> report.Prediction:
    """Run the program, once or with two depths, and return what is predicted. Raises NotPredicted."""
    _check_program(options.program, options.module)
    card = cards.named(options.card)
    with tempfile.TemporaryDirectory(prefix="peakmem-") as folder:
        _say(f"{options.program}: running it on a stand-in for the {card.words}; what it prints has no real numbers")
        whole = _Run(options, Path(folder, "whole"), None, 0, not options.full).result()
        if whole.ended != "probed" or whole.stack is None:
            return report.of_run(card, whole)
        stack = whole.stack
        depths = stack.depths
        _say(f"a stack of {stack.layers} equal layers ({stack.layer}): running it with {depths[0]} and {depths[1]}")
        runs = [_Run(options, Path(folder, str(n)), stack, n, False) for n in depths]
        shallow, deeper = (run.result() for run in runs)
        return report.of_depths(card, shallow, deeper)


def _check_program(program: str, module: bool) -> None:
    """Raise NotPredicted where there is no such file, command of a package, or module."""
    if module:
        sys.path.insert(0, os.getcwd())  # as `python -m` looks for it
        if importlib.util.find_spec(program.partition(".")[0]) is None:
            raise NotPredicted(f"-m {program}: there is no module of that name")
    elif not (Path(program).is_file() or importlib.metadata.entry_points(group="console_scripts", name=program)):
        raise NotPredicted(f"{program}: no such file, and no package has a command of that name")


class _Run:
    """The program in a process of its own, whose output goes to stderr; that of a shortened model only if it fails."""

    def __init__(self, options: argparse.Namespace, into: Path, stack: Stack | None, layers: int, probing: bool):
        command = [sys.executable, "-m", "peakmem", "--card", options.card, "--steps", str(options.steps)]
        command += ["--into", str(into), "--layers", str(layers)]
        command += ["--stack", f"{stack.layer} {stack.layers} {stack.period}"] if stack else []
        command += ["--probing"] * probing + ["-m"] * options.module
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._options, self._into, self._layers = options, into, layers
        self._process = subprocess.Popen(
            [*command, options.program, *options.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
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
        """Return what was recorded, when the process has ended. Raises NotPredicted."""
        code = self._process.wait()
        self._reading.join(timeout=1)
        ended = self._into.exists()
        if self._layers and not ended:
            _write(self._said)
        if (self._said or b"\n")[-1:] != b"\n" and (not self._layers or not ended):
            _write(b"\n")  # after a bar of progress
        if not ended:
            way_out = "; --full runs all its layers" if self._layers else ""
            raise NotPredicted(
                f"{self._options.program} ended with an error ({code}) before its first steps were done{way_out}"
            )
        record: Record = pickle.loads(self._into.read_bytes())
        if record.refused:
            raise NotPredicted(record.refused)
        return record


def _write(said: bytes) -> None:
    sys.stderr.buffer.write(said)
    sys.stderr.flush()


def _follow(options: argparse.Namespace) -> None:
    """Run the program in this process, and write what was recorded."""
    from peakmem.script import Followed, follow

    name, *sizes = (options.stack or "").rsplit(" ", 2)
    stack = Stack(name, *map(int, sizes)) if name else None

    def keep(record: Record) -> NoReturn:
        Path(options.into).write_bytes(pickle.dumps(record))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # whatever the program would still do

    run = Followed(cards.named(options.card), options.steps, stack, options.layers, options.probing, keep)
    follow([options.program, *options.arguments], options.module, run)


def _say(text: str) -> None:
    print(f"peakmem: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
