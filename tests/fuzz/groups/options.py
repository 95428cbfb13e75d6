"""Command lines: options, numbers, names and paths that nobody should give."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.fuzz.groups.data_files import lines, rows_of
from tests.fuzz.mutate import TEXTS
from tests.fuzz.oracle import Case, Must
from tests.fuzz.reference import Reference

NUMBERS = (
    *("-1", "0", "1", "1e3", "1.5", "4294967295", "4294967296", "9" * 30, "nan", "inf", "-inf"),
    *("x", "0x10", "1_0", "٣", "１", "--", "1;2", "", " "),
)
WORDS = (*(text for text in TEXTS if "\x00" not in text and "\ud800" not in text), "\udcff", "\udcc3\x1b[2J", "x" * 300)
COMMANDS = (
    *("run", "recipes", "fetch", "chat", "score", "serve"),
    *("report", "ab", "judge", "compare", "ratings", "data"),
    *("reproduce", "plan", "results", "", "--version", "-h", "sft", "\x1b[31m", "\udcff"),
)

# Command lines with places for a word (W), a number (N) and a path (P); R: recipe and run directory.
TEMPLATES = (
    "run pretrain --recipe {recipe} --out P",
    "run sft --recipe {recipe} --out P",
    "run sft R --data P",
    "run sft R --data P --data P",
    "run sft R P",
    "run sft R --weights P",
    "run sft --recipe P --out new",
    "run sft --hw W --out new",
    "run pretrain --recipe {recipe} --out new --seed N",
    "run pretrain --recipe {recipe} --out new --seed N --price N",
    "run sft R --price N",
    "run sft R --report-to W",
    "run sft R --stop-on W",
    "run W R",
    "run W W",
    "run sft R --W",
    "run sft R W W",
    "fetch --recipe P",
    "fetch --hw W",
    "fetch --recipe {recipe} --set W",
    "data check P",
    "data check rows.jsonl P",
    "data check rows.jsonl --heldout P",
    "data check rows.jsonl --to P",
    "data check rows.jsonl --heldout-fraction N",
    "data check rows.jsonl --seed N --json",
    "data check rows.jsonl --tokenizer P",
    "data show P",
    "data show rows.jsonl --rows N --seed N",
    "data show rows.jsonl --only W",
    "data convert rows.jsonl --to P",
    "data convert rows.jsonl --to new.jsonl --rename W",
    "data W",
    "reward W --data rows.jsonl",
    "reward length(most=9) --data P --rows N",
    "reward P --recipe {recipe}",
    "chat R --stage W",
    "chat R --stage sft --temperature N",
    "chat R --stage sft --tokens 3 --temperature 0",
    "score R P",
    "score R rows.jsonl --to P",
    "score R --prompt W --response W",
    "score R --prompt W",
    "score R --response W",
    "report P",
    "report R W",
    "report --recipe {recipe} --out {out} --to P",
    "report --recipe {recipe} --out {out} --to page.html --price N",
    "ab --recipe {recipe} --out {out} --summary --a W",
    "ab --recipe {recipe} --out {out} --summary --b W --json",
    "ab --recipe {recipe} --out P --summary",
    "ab --recipe {recipe} --out {out} --rater W --summary",
    "ab --recipe {recipe} --out {out} --limit N --summary",
    "ab --recipe {recipe} --out {out} --seed N --summary",
    "judge --recipe {recipe} --out {out} --url W --model W",
    "judge --recipe {recipe} --out {out} --url http://127.0.0.1:1/v1 --model W",
    "judge --recipe {recipe} --out {out} --url http://127.0.0.1:1/v1 --model m --parallel N --limit N",
    "compare P {root}",
    "compare {root} P",
    "compare {root} {root} W",
    "compare {root} {root} --W",
    "ratings export {root} --to P",
    "ratings export P --to new.jsonl",
    "ratings export {root} --to new.jsonl --rater W",
    "ratings W",
    "results P",
    "serve R --port N",
    "serve --recipe {recipe} --out P",
    "serve R --engine W",
    "plan --recipe P",
    "plan --hw W",
    "plan --recipe {recipe} --stage W",
    "plan --recipe {recipe} --set W",
    "plan --recipe {recipe} --fit W --fastest",
    "plan --recipe {recipe} --price N --fastest --strategies",
    "reproduce --recipe P --out new",
    "reproduce --recipe {recipe} --out new --seeds W --until W",
    "reproduce --recipe {recipe} --out new --seeds 0 --until W",
    "C",
    "C W",
    "C --W N",
    "C P N",
)
# What serves until it is stopped, or asks a server, must never come so far; words that are right by chance would.
NEVER = {"serve": "nothing is merged in the run", "plan": "takes a minute", "reproduce": "starts processes"}


def case(random: Random, place: Path, reference: Reference) -> Case:
    root = reference.copy(place / "out")
    (place / "rows.jsonl").write_bytes(lines(rows_of("preference", 4)))
    template = random.choice(TEMPLATES).format(recipe=reference.recipe, out="out", root=root.relative_to(place))
    words = template.replace(" R", f" --recipe {reference.recipe} --out out").split(" ")
    makers: dict[str, Callable[[], str]] = {
        "W": lambda: random.choice(WORDS),
        "N": lambda: random.choice(NUMBERS),
        "P": lambda: _path(random, place),
        "C": lambda: random.choice(COMMANDS),
    }
    arguments = [
        makers[word]() if word in makers else word.replace("--W", f"--{random.choice(WORDS)}") for word in words
    ]
    must: Must = "either"
    if arguments[0] in NEVER and "-h" not in arguments:
        arguments += ["--no-such-option"] if random.random() < 0.2 else []
        must = "refuse"
        if arguments[0] == "serve":
            shutil.rmtree(root / "merge")
    if arguments[0] in ("ab",) and "--summary" not in arguments:
        arguments.append("--summary")
    # Files that a command writes over by its own rules (a page, a report) are no loss: only the run is looked at.
    found = Case(
        f"rlhf {' '.join(arguments)}",
        arguments,
        place / "out",
        must=must,
        reports=(1, 3) if arguments[:2] == ["data", "check"] or arguments[0] == "reward" else (),
    )
    found.stdin = random.choice(
        (
            b"",
            b"Hello\n",
            b"\xff\xfe\x00\n\x1b[2J\n",
            b"/temperature nan\n/tokens -1\n/evil\n",
            b"x" * 5000 + b"\n",
        )
    )
    return found


def _path(random: Random, place: Path) -> str:
    """A path that is no good place for anything, relative to `place`."""
    kind = random.randrange(14)
    if kind == 0:
        os.mkfifo(place / "pipe") if not (place / "pipe").exists() else None
        return "pipe"
    if kind == 1:
        return random.choice(("/dev/zero", "/dev/full", "/dev/null", "/dev/random", "/proc/self/mem", "/dev/stdin"))
    if kind == 2:
        (place / "loop").symlink_to("loop") if not (place / "loop").is_symlink() else None
        return random.choice(("loop", "loop/below"))
    if kind == 3:
        (place / "dangling").symlink_to("nowhere/at/all") if not (place / "dangling").is_symlink() else None
        return "dangling"
    if kind == 4:
        return random.choice(("rows.jsonl", "rows.jsonl/below", "./rows.jsonl"))
    if kind == 5:
        return random.choice((".", "", "out", "out/..", "/proc", "/proc/1"))
    if kind == 6:
        return random.choice(("x" * 300, "/".join(["y" * 200] * 30)))
    if kind == 7:
        name = random.choice(
            ("\x1b[31mred", "a\nerror: b", "caf\udce9", "\u202egnp", "\x7f", " ", "-", "--help", "[bold]")
        )
        return random.choice((name, f"./{name}", f"new/{name}"))
    if kind == 8:
        name = random.choice(("\x1b[31mred.jsonl", "caf\udce9.jsonl", "a\nb.jsonl", "\u202elnosj", "[bold].jsonl"))
        (place / name).write_bytes(lines(rows_of("preference", 4)))
        return name
    if kind == 9:
        name = random.choice(("\x1b[2J.jsonl", "bad\udcff.jsonl", "b\rad.jsonl"))
        (place / name).write_bytes(b'{"prompt": 3}\nnot JSON\n')
        return name
    if kind == 10:
        name = random.choice(("folder", "fold\x1b[31mer", "fold\udcffer"))
        (place / name / "v1").mkdir(parents=True, exist_ok=True)
        return random.choice((name, f"{name}/v1"))
    if kind == 11:
        return random.choice(("hf://models/x", "http://127.0.0.1:1/x", "~nobody/x", "$HOME/x", "*.jsonl", "a;b", "%00"))
    if kind == 12:
        (place / "empty.jsonl").touch()
        return "empty.jsonl"
    return random.choice(("no/such/thing", "new"))
