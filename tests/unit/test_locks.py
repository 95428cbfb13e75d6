"""pyproject.toml and the pins in requirements/ agree, and neither names a place that only one machine knows."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = ROOT / "requirements" / "cpu.txt"

PYTHONS = ["3.11", "3.12", "3.13"]
IMPORT_NAMES = {"pyyaml": "yaml", "nvidia-ml-py": "pynvml"}  # where it is not the package's own name

PLACES = {
    "address": r"://",
    "host name": r"(?i)\b[\w-]+\.(com|dev|io|net|org)\b",
    "index option": r"(?<![\w-])--(extra-index-url|find-links|index-url|trusted-host)\b",
    "local path": r"(^|[\s\"'=@(])~?/(?!dev/null)\w",
}


def direct_dependencies() -> list[Requirement]:
    project = PYPROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]


def pins() -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in LOCK.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def pinned_version(pin: Requirement) -> Version:
    (specifier,) = pin.specifier
    assert specifier.operator == "==", f"{pin} is not a pin"
    return Version(specifier.version)


def pins_for(python: str) -> dict[str, Version]:
    """Name -> version of the pins that hold on Linux with this Python."""
    environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    valid = [pin for pin in pins() if pin.marker is None or pin.marker.evaluate(environment)]
    names = [canonicalize_name(pin.name) for pin in valid]
    assert len(names) == len(set(names)), f"two pins for one package on Python {python}"
    return dict(zip(names, map(pinned_version, valid), strict=True))


@pytest.mark.parametrize("python", PYTHONS)
def test_every_direct_dependency_has_a_fitting_pin(python):
    pinned = pins_for(python)
    wrong = [
        f"{wanted}: pinned {pinned.get(canonicalize_name(wanted.name), 'nowhere')}"
        for wanted in direct_dependencies()
        if not wanted.specifier.contains(pinned.get(canonicalize_name(wanted.name), "0"), prereleases=True)
    ]
    assert not wrong, f"run `make lock` (Python {python}): {wrong}"


def test_pins_admit_the_cpu_only_and_the_cuda_wheel():
    """No CUDA packages, no local versions such as 2.13.0+cpu, no hashes: lock.sh says why."""
    assert not [str(pin) for pin in pins() if re.match(r"nvidia-(?!ml-py)|cuda-|triton", pin.name)]
    assert not [str(pin) for pin in pins() if pinned_version(pin).local]
    assert "--hash" not in "".join(line for line in LOCK.read_text().splitlines() if not line.startswith("#"))


# The ends of hosts' names: the package index and its files, npm and its mirrors, conda, and Rust's crates.
REGISTRY = re.compile(r"\b(?:pypi|pythonhosted|npmjs|unpkg|jsdelivr|(?:ana)?conda|crates)\.(?:org|com|io|net)\b", re.I)


def test_no_file_names_a_registry_s_host():
    """A package is known by its name and version, wherever it comes from."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    texts = {file: file.read_text(errors="ignore") for file in files if file.is_file()}
    assert not [str(file.relative_to(ROOT)) for file, text in texts.items() if REGISTRY.search(text)]


@pytest.mark.parametrize("path", ["pyproject.toml", *sorted(f"requirements/{p.name}" for p in LOCK.parent.glob("*.*"))])
def test_no_place_that_only_one_machine_knows(path):
    text = re.sub(r"(?ms)^\[project\.urls\]\n.*?(?=^\[|\Z)", "", (ROOT / path).read_text())
    found = [
        f"{path}:{number}: {kind}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for kind, pattern in PLACES.items()
        if re.search(pattern, line)
    ]
    assert not found, "\n".join(found)


def test_every_package_that_rlhf_imports_is_declared():
    declared = {canonicalize_name(wanted.name) for wanted in direct_dependencies()}
    known = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in declared}
    known |= {"rlhf", "peakmem", "_typeshed"} | set(sys.stdlib_module_names)
    unknown = []
    for path in sorted((ROOT / "rlhf").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules = [node.module]
            else:
                continue
            unknown += [f"{path.relative_to(ROOT)}: {name}" for name in modules if name.split(".")[0] not in known]
    assert not unknown, f"imported but not in pyproject.toml: {unknown}"
