"""Packages that the GPU benchmark needs, and how to install missing ones. Uses the standard library alone."""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

IMPORTED_AS = {"pyyaml": "yaml", "nvidia-ml-py": "pynvml"}  # where a project's name is not its module's
EVALUATE_ONLY = ("rouge-score", "sacrebleu")  # dependencies that only the stage `evaluate` imports
OPTIONAL = {
    "bitsandbytes": "the items with 4-bit weights and paged optimizers",
    "pytest": "the items that run tests/gpu",
    "nvidia-ml-py": "energy and the memory of the whole card",
}


def required(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """Return the benchmark's dependencies in pyproject.toml, name -> version specifier."""
    import tomllib

    lines = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    parts = [re.split(r"(?=[<>=!~])", line, maxsplit=1) for line in lines]
    specifiers = {name.split("[")[0].strip(): "".join(specifier).strip() for name, *specifier in parts}
    return {name: specifier for name, specifier in specifiers.items() if name not in EVALUATE_ONLY}


def installed_version(name: str) -> str | None:
    """Return the version of a package; "unknown" if it has no metadata; None if it is absent."""
    module = IMPORTED_AS.get(name.lower(), name.replace("-", "_"))
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return str(getattr(importlib.import_module(module), "__version__", "unknown"))
    except Exception:  # a damaged package may raise anything; its items report it
        return "unknown"


def fits(version: str, specifier: str) -> bool | None:
    """Return whether a version satisfies a specifier such as `==2.13.*`; None if that is unknown."""
    try:
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion, Version
    except ImportError:
        return None
    try:
        return Version(version) in SpecifierSet(specifier, prereleases=True)
    except InvalidVersion:
        return None


def missing() -> list[str]:
    """Return the names of required packages that cannot be imported."""
    return [name for name in required() if installed_version(name) is None]


def report() -> list[str]:
    """Return a line for each required package that is missing or has a version that the project does not expect."""
    lines = []
    for name, specifier in required().items():
        version = installed_version(name)
        if version is None:
            lines.append(f"missing: {name} {specifier}")
        elif fits(version, specifier) is False:
            lines.append(f"other version: {name} {version}, the project is written for {specifier}")
    return lines


def indirect() -> list[str]:
    """Return a line for each missing package that a required one needs, by itself or through others.

    What a package needs is in its metadata. Torch's requirements are left out: where it finds CUDA's libraries depends
    on its installation.
    """
    lines = []
    open_names, known = [*required()], {*required(), "torch"}
    for name in open_names:  # grows while it is walked
        for needed in _needs(name):
            if not _present(needed):
                lines.append(f"missing: {needed}, needed by {name}")
            elif needed not in known:
                known.add(needed)
                open_names.append(needed)
    return list(dict.fromkeys(lines))


def _needs(name: str) -> list[str]:
    """Return the packages that an installed one needs here; none of torch, and of one without metadata."""
    try:
        from packaging.requirements import Requirement

        lines = [] if name == "torch" else importlib.metadata.requires(name) or []
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return []
    requirements = map(Requirement, lines)
    return [needed.name for needed in requirements if needed.marker is None or needed.marker.evaluate({"extra": ""})]


def _present(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return installed_version(name) is not None
    return True


def optional() -> list[str]:
    """Return a line for each missing package that only some items need."""
    return [
        f"missing: {name}, needed by {purpose}" for name, purpose in OPTIONAL.items() if installed_version(name) is None
    ]


def way_out(names: list[str]) -> str:
    """Return instructions to install packages here, with a network and without one."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    listing = " ".join(names)
    return f"""With a network here:     pip install '.[gpu]' pytest   (or: make bench-gpu)
Without one, on a machine that has it, in this checkout:
  pip download --only-binary=:all: --no-deps --python-version {python} --platform manylinux_2_28_x86_64 \\
      -c requirements/cpu.txt -d wheels {listing}
then copy the folder `wheels` here and
  pip install --no-index --no-deps --target carried wheels/*.whl
  PYTHONPATH=carried python -m bench.gpu
What these packages need themselves the next --check names."""
