"""Environments of peers whose packages do not go with ours; they are made when they are needed first."""

import json
import os
import shlex
import subprocess
import venv
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from bench.paths import require_own_folder
from rlhf.terminal.screen import OUT

TRL = "1.12.0"  # the last release with a PPOTrainer
# torchtune's last release and the last torchao with which it can be imported; what else it needs is left to pip.
TORCHTUNE = {"torchtune": "0.6.1", "torchao": "0.10.0"}


def peer_python(folder: Path) -> Path:
    """Return the interpreter of an environment that holds TRL 1.12 and otherwise the versions installed here."""
    return _environment(folder, {"trl": TRL}, ("torch", "transformers", "peft", "accelerate", "datasets"))


def torchtune_python(folder: Path) -> Path:
    """Return the interpreter of an environment that holds torchtune, and torch and transformers as installed here."""
    return _environment(folder, TORCHTUNE, ("torch", "transformers"))


def versions(python: Path) -> dict[str, str]:
    """Return all packages of an environment with their versions, by name."""
    list_packages = (
        "import json; from importlib.metadata import distributions; "
        "print(json.dumps({package.name: package.version for package in distributions()}))"
    )
    answer = subprocess.run([str(python), "-c", list_packages], capture_output=True, text=True, check=True).stdout
    packages: dict[str, str] = json.loads(answer)
    return dict(sorted(packages.items()))


def _environment(folder: Path, packages: Mapping[str, str], ours: Sequence[str]) -> Path:
    """Return the interpreter of an environment with `packages` and the versions installed here of `ours`; make it."""
    python = folder / "bin" / "python"
    # A local version, as 2.13.0+cpu, is not one that can be asked for.
    wanted = dict(packages) | {name: version(name).partition("+")[0] for name in ours}
    check = "; ".join(f"assert version({name!r}).partition('+')[0] == {pin!r}" for name, pin in wanted.items())
    check = f"from importlib.metadata import version; {check}; import {', '.join(packages)}"
    if not python.exists() or subprocess.run([str(python), "-c", check], capture_output=True).returncode:
        pins = [f"{name}=={pin}" for name, pin in wanted.items()]
        require_own_folder(folder, "pyvenv.cfg")
        OUT.print(f"installing {', '.join(pins)} into {folder}; this takes minutes")
        venv.create(folder, with_pip=True, clear=True)
        more = shlex.split(os.environ.get("PIP_ARGS", ""))
        subprocess.run([python, "-m", "pip", "install", "--quiet", *more, *pins], check=True)
    return python
