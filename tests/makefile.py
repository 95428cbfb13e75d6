"""What the Makefile says of its targets, as make itself reads it."""

import functools
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ANYWHERE = {"RUNTIME", "PYTHON", "VENV", "EXTRAS", "PIP_ARGS"}  # of every target


@functools.cache
def takes() -> Mapping[str, set[str]]:
    """The variables that each target takes, with those of the targets that it runs first."""
    clean = {name: os.environ[name] for name in ("PATH", "HOME")}
    command = ["make", "-pn", "help", "RUNTIME=docker"]
    database = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True).stdout
    found = re.findall(r"^(?:takes|also)\.([a-z-]+) :=(.*)$", database, re.M)
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    return {
        target: ANYWHERE | {name for of, names in found if of == target for name in names.split()} for target in targets
    }


@functools.cache
def known() -> set[str]:
    """Every variable that some target takes."""
    return set().union(*takes().values())
