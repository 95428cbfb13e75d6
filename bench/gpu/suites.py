"""Items that run tests."""

import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import Counter

from bench.gpu.item import Context
from bench.gpu.measured import SuiteFigures
from bench.gpu.record import Decision
from bench.paths import ROOT
from rlhf.process.children import child_environment


def measure(context: Context[SuiteFigures], tests: list[str], choose: str) -> Decision:
    """Run tests that pytest's `-k` chooses; the claim holds when some ran and all passed."""
    report = context.scratch / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *tests, "-k", choose]
    process = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, env=child_environment())
    if not report.exists():
        raise RuntimeError(f"pytest ended with exit code {process.returncode} and no report")
    cases = {f"{case.get('classname')}::{case.get('name')}": case for case in xml.parse(report).iter("testcase")}
    outcomes = {name: _outcome(case) for name, case in cases.items()}
    context.measured["tests"] = outcomes
    context.measured["messages"] = {
        name: " ".join((case[0].get("message") or "").split())[:500]
        for name, case in cases.items()
        if outcomes[name] in ("failure", "error")
    }
    return decision(outcomes, context.dry_run)


def decision(outcomes: dict[str, str], dry_run: bool) -> Decision:
    """Return the decision: failures decide against the claim; without a GPU or a test nothing is decided."""
    count = dict(sorted(Counter(outcomes.values()).items()))
    why = ", ".join(f"{number} {outcome}" for outcome, number in count.items()) or "no test was chosen"
    if count.get("failure") or count.get("error"):
        return Decision(False, why)
    return Decision(True if count.get("passed") and not dry_run else None, why)


def _outcome(case: xml.Element) -> str:
    """Return the outcome of a test: passed, skipped, failure or error."""
    return next((part.tag for part in case if part.tag in ("skipped", "failure", "error")), "passed")
