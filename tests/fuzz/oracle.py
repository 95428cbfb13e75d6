"""What every command owes, whatever it was given: the one judge of all cases."""

import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlhf.run.finished import result_hash
from rlhf.run.layout import CARD
from tests.fuzz.sandbox import Outcome

LONGEST_LINE = 2000  # characters of a line on stderr
MOST_LINES = 30  # on stderr
ERROR = re.compile(r"^error: ", re.M)
# Everything a terminal may obey: C0 without tab and newline, DEL, C1, and the marks that reorder text.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
SOUND = 0.05  # share of cases that nothing is wrong with: a group that refuses everything has learned nothing
CANARY = "fuzz-canary"  # a file that only executed input would make


Must = Literal["refuse", "accept", "either"]


@dataclass
class Case:
    """One malformed input and the command that reads it.

    `must` says what is known beforehand: "refuse", "accept", or "either" where the mutation may be harmless. What is
    accepted has to pass `valid`, which returns the reason why the result is wrong, or None. Files below `kept` must
    survive a refusal. `reports` is the exit codes at which a command may report on stdout what it found in its input,
    without an error line.
    """

    name: str
    arguments: list[str]
    kept: Path
    stdin: bytes = b""
    must: Must = "either"
    valid: Callable[[Outcome], str | None] = lambda outcome: None
    reports: tuple[int, ...] = ()
    rewritten: tuple[str, ...] = ()  # names of files that a refusal may leave with other content


@dataclass
class Verdict:
    """`flaws` maps the kind of a flaw (traceback, hang, memory, message, lost, wrong) to what was seen."""

    accepted: bool
    flaws: dict[str, str] = field(default_factory=dict)


def judge(case: Case, outcome: Outcome, before: dict[str, str]) -> Verdict:
    """Hold what a command did against what it owes; `before` is `hashes(case.kept)` from before it ran."""
    text, shown = (stream.decode("utf-8", "surrogateescape") for stream in (outcome.err, outcome.out))
    verdict = Verdict(outcome.code == 0 or (outcome.code in case.reports and not ERROR.search(text)))
    flaws = verdict.flaws
    if outcome.stopped == "time":
        flaws["hang"] = f"{outcome.cpu:.0f} s of CPU and no end"
    elif outcome.stopped == "memory":
        flaws["memory"] = f"{outcome.peak / 1e9:.1f} GB resident"
    elif outcome.code < 0:
        flaws["traceback"] = f"ended by signal {-outcome.code}"
    if "Traceback (most recent call last)" in text or "this is a bug" in text:
        raised = re.findall(r"^[\w.]+(?:Error|Exception|Interrupt|Exit)\b.*", text, re.M)
        flaws["traceback"] = (raised or text.strip().splitlines())[-1][:300]
    if not flaws:
        said = _speech(verdict.accepted, text, shown)
        if said:
            flaws["message"] = said
    if next(case.kept.rglob(CANARY), None):
        flaws["wrong"] = "a part of the input was executed"
    if verdict.accepted:
        if case.must == "refuse":
            flaws["wrong"] = "accepted"
        elif (reason := case.valid(outcome)) is not None:
            flaws["wrong"] = f"accepted, and {reason}"
    else:
        if case.must == "accept":
            flaws["wrong"] = f"refused: {text.strip()[-300:]}"
        lost = [name for name in missing(before, hashes(case.kept)) if Path(name).name not in case.rewritten]
        if lost:
            flaws["lost"] = f"refused, and gone: {', '.join(lost[:3])}"
    return verdict


def _speech(accepted: bool, err: str, out: str) -> str | None:
    """What is wrong with the words of a command that ended by itself, or None."""
    for name, text in (("stderr", err), ("stdout", out)):
        if re.search(r"[\ud800-\udfff]", text):
            return f"{name} is not UTF-8"
        if found := CONTROL.search(text):
            return f"{name} has the raw control character {found[0]!r}"
    lines = err.splitlines()
    if len(lines) > MOST_LINES:
        return f"{len(lines)} lines on stderr"
    if lines and max(map(len, lines)) > LONGEST_LINE:
        return f"a line of {max(map(len, lines)):,} characters"
    errors = len(ERROR.findall(err))
    if not errors and not accepted and re.match(r"\s*Usage: .*^Commands:$", out + err, re.S | re.M):
        return None  # a group without a command lists its commands
    if errors != (0 if accepted else 1):
        return f"{'accepted' if accepted else 'refused'} with {errors} error lines: {err.strip()[-300:]!r}"
    return None


def hashes(root: Path) -> dict[str, str]:
    """The hash of every ordinary file below `root` by its path there; pages about results follow the records."""
    return {str(file.relative_to(root)): result_hash(file) for file in files(root) if file.name != CARD}


def files(root: Path) -> Iterator[Path]:
    """Ordinary files below `root`; links, pipes and devices are none, and the sandbox's own files are left out."""
    for path in sorted(root.rglob("*")):
        if not path.name.startswith(".fuzz-") and stat.S_ISREG(path.lstat().st_mode):
            yield path


def missing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Files whose bytes are nowhere any more. A directory that was set aside keeps them under another name."""
    there = Counter(after.values())
    lost = Counter(before.values()) - there
    names = []
    for name, digest in before.items():
        if lost[digest] > 0 and after.get(name) != digest:
            lost[digest] -= 1
            names.append(name)
    return names
