"""`peakmem --card 4090 train.py ARGS…`: peak memory of a program as it is, predicted without a GPU."""

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from peakmem import cards, predicting, report
from peakmem.events import Crashed, NotPredicted

EXIT = "exit codes: 0 it fits or no card is named, 1 it may not fit, 2 wrong options, 3 refused, 4 failed, 5 crashed"


def main() -> None:
    """Predict, print and exit: with 0 if the program fits, 1 if it may not, and else with the error's code."""
    options = _options(sys.argv[1:])
    try:
        found = _predict(options)
    except NotPredicted as error:
        _fail(options, error)
    except Exception as error:
        traceback.print_exc()
        _fail(options, Crashed(f"a fault of peakmem: {type(error).__name__}: {error}; please report it"))
    sys.exit(0 if found is not None and found.fits is not False else 1)


def _predict(options: argparse.Namespace) -> report.Prediction | None:
    run = predicting.Run(
        options.program,
        tuple(options.arguments),
        options.module,
        options.card,
        options.steps,
        options.batches,
        options.longest,
        options.full,
        options.scratch,
    )
    if options.fit:
        value, found = predicting.fit(options.fit, run)
        print(json.dumps({options.fit: value}) if options.json else f"largest {options.fit} that fits: {value}")
    else:
        found = predicting.predict_run(run)
        print(report.as_json(found) if options.json else report.as_text(found))
    if options.snapshot and found:
        found.write_snapshot(Path(options.snapshot))
    return found


def _fail(options: argparse.Namespace, error: NotPredicted) -> None:
    """Say why there is no prediction, and exit."""
    print(f"peakmem: {error.kind}: {error}", file=sys.stderr)
    if options.json:
        print(json.dumps({"error": error.kind, "message": str(error)}))
    sys.exit(error.code)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the options, and exit with 2."""
        if "--json" in sys.argv:
            print(json.dumps({"error": "options", "message": message}))
        super().error(message)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="peakmem",
        description="Predict the peak GPU memory of a training program, without a GPU. The program really runs.",
        epilog=EXIT,
    )
    add = parser.add_argument
    add("--version", action="version", version=_version())
    add("--card", help=f"a size such as 24GiB, or one of {', '.join(cards.names())}; without it nothing is decided")
    add("--steps", type=_number, default=2, help="optimizer steps after which the run ends (default: 2)")
    add(
        "--batches",
        type=_number,
        default=predicting.BATCHES,
        help=f"batches that are read to find the largest (default: the first epoch, {predicting.BATCHES:,} at most)",
    )
    add("--longest", type=_number, metavar="TOKENS", help="run the largest batch with rows of so many tokens")
    add("--fit", metavar="ARGUMENT", help="find the largest value of this option of the program that fits the card")
    add("--full", action="store_true", help="run all layers, instead of few that are extrapolated")
    add("--scratch", action="store_true", help="run the program in a copy of this folder, which is then deleted")
    add("--snapshot", metavar="FILE", help="write torch's memory snapshot, which pytorch.org/memory_viz shows")
    add("--json", action="store_true", help="print JSON, also where there is no prediction")
    add("-m", dest="module", action="store_true", help="PROGRAM is a module")
    add("program", metavar="PROGRAM", help="a file, a console script such as trl, or a module (-m)")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="of the program, if any").required = False
    options = parser.parse_args(arguments)
    try:
        if options.card is not None:
            cards.named(options.card)
    except ValueError as error:
        parser.error(f"--card: {error}")
    if options.fit and options.card is None:
        parser.error("--fit needs a card: name one with --card")
    if options.snapshot and not Path(options.snapshot).parent.is_dir():
        parser.error(f"--snapshot {options.snapshot}: there is no such folder")
    return options


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _version() -> str:
    try:
        return f"peakmem {version('peakmem')}"
    except PackageNotFoundError:
        return "peakmem (a checkout)"


if __name__ == "__main__":
    main()
