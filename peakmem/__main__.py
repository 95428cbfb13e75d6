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
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from peakmem import report
from peakmem.cards import CARDS
from peakmem.events import NotPredicted
from peakmem.script import Record, Stack

EVEN, ODD = (2, 4), (3, 5)  # layers of the short runs


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
    known = ", ".join(name for name, card in CARDS.items() if card.memory)
    parser = argparse.ArgumentParser(
        prog="peakmem", description="Predict the peak GPU memory of a training program, without a GPU."
    )
    parser.add_argument("--card", required=True, metavar="CARD", help=f"the card that is stood in for: {known}")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps after which the run ends (default: 2)")
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
    if options.card not in CARDS or CARDS[options.card].memory is None:
        parser.error(f"--card {options.card}: not known; known are {known}")
    return options


def predict(options: argparse.Namespace) -> report.Prediction:
    """Run the program, once or with two depths, and return what is predicted. Raises NotPredicted."""
    _check_program(options.program, options.module)
    with tempfile.TemporaryDirectory(prefix="peakmem-") as folder:
        _say(f"{options.program}: running it on a stand-in for the {CARDS[options.card].words}")
        whole = _result(_started(options, Path(folder, "whole"), None, 0, not options.full), options)
        if whole.ended != "probed" or whole.stack is None:
            return report.of_run(options.card, whole)
        stack = whole.stack
        depths = ODD if stack.layers % 2 else EVEN
        _say(f"a stack of {stack.layers} equal layers ({stack.layer}): running it with {depths[0]} and {depths[1]}")
        runs = [_started(options, Path(folder, str(n)), stack, n, False) for n in depths]
        shallow, deeper = (_result(run, options) for run in runs)
        return report.of_depths(options.card, shallow, deeper, depths)


def _check_program(program: str, module: bool) -> None:
    """Raise NotPredicted where there is no such file, command of a package, or module."""
    if module:
        sys.path.insert(0, os.getcwd())  # as `python -m` looks for it
        if importlib.util.find_spec(program.partition(".")[0]) is None:
            raise NotPredicted(f"-m {program}: there is no module of that name")
    elif not (Path(program).is_file() or importlib.metadata.entry_points(group="console_scripts", name=program)):
        raise NotPredicted(f"{program}: no such file, and no package has a command of that name")


Run = tuple["subprocess.Popen[bytes]", Path]


def _started(options: argparse.Namespace, into: Path, stack: Stack | None, layers: int, probing: bool) -> Run:
    command = [sys.executable, "-m", "peakmem", "--card", options.card, "--steps", str(options.steps)]
    command += ["--into", str(into), "--layers", str(layers)]
    command += ["--stack", f"{stack.layer} {stack.layers}"] if stack else []
    command += ["--probing"] * probing + ["-m"] * options.module
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*command, options.program, *options.arguments], stdout=sys.stderr.fileno(), env=environment
    ), into


def _result(run: Run, options: argparse.Namespace) -> Record:
    process, into = run
    code = process.wait()
    if not into.exists():
        raise NotPredicted(
            f"{options.program} ended with an error ({code}) before its first steps were done; see above"
        )
    record: Record = pickle.loads(into.read_bytes())
    if record.refused:
        raise NotPredicted(record.refused)
    return record


def _follow(options: argparse.Namespace) -> None:
    """Run the program in this process, and write what was recorded."""
    from peakmem.script import Followed, follow

    name, _, layers = (options.stack or "").rpartition(" ")
    stack = Stack(name, int(layers)) if name else None

    def keep(record: Record) -> NoReturn:
        Path(options.into).write_bytes(pickle.dumps(record))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # whatever the program would still do

    card = CARDS[options.card]
    run = Followed(card, options.steps, stack, options.layers, options.probing, keep)
    follow([options.program, *options.arguments], options.module, run)


def _say(text: str) -> None:
    print(f"peakmem: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
