"""A wheel of this project, installed where the checkout is not to be seen."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A fresh environment with the wheel; it sees the packages of this one, but not the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("rlhf", "peakmem", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(source)]
    subprocess.run(wheel, check=True)
    shutil.rmtree(source)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    places = [place for place in sys.path if place.endswith("site-packages")]
    (packages / "outside.pth").write_text("\n".join(places) + "\n")
    (file,) = folder.glob("*.whl")
    python = str(folder / "venv" / "bin" / "python")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", str(file)], check=True)
    return folder / "venv" / "bin" / "rlhf"


def run(program: Path, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the installed `rlhf` in `folder`, without what could lead it to the checkout."""
    hidden = ("PYTHONPATH", "RLHF_RECIPES", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    kept |= {"XDG_CACHE_HOME": str(folder), **environment}
    return subprocess.run([str(program), *arguments], cwd=folder, env=kept, capture_output=True, text=True)


def test_a_wheel_brings_its_recipes(installed, tmp_path):
    done = run(installed, tmp_path, "recipes")
    assert done.returncode == 0, done.stderr
    rows = [line.split("│") for line in done.stdout.splitlines() if "│" in line]
    shown = "".join(row[1].strip() for row in rows)  # long paths are folded
    assert "cpu-tiny/v1" in shown and "4090-llama2-7b/v3" in shown
    assert str(ROOT) not in shown, "the checkout's recipes were read, not the wheel's"
    assert str(installed.parents[1]) in shown


def test_a_wheel_brings_its_pages_and_peakmem_without_its_tests(installed):
    (packages,) = installed.parents[1].glob("lib/python*/site-packages")
    modules = {file.relative_to(ROOT) for part in ("*.py", "patches/*.py") for file in (ROOT / "peakmem").glob(part)}
    assert {file.relative_to(packages) for file in (packages / "peakmem").rglob("*.py")} == modules
    for kind, least in (("html", 4), ("typed", 0)):
        ours = {str(file.relative_to(ROOT)) for file in (ROOT / "rlhf").rglob(f"*.{kind}")}
        theirs = {str(file.relative_to(packages)) for file in (packages / "rlhf").rglob(f"*.{kind}")}
        assert ours == theirs and len(ours) > least


@pytest.mark.slow
def test_a_wheel_plans_from_an_empty_folder(installed, tmp_path):
    done = run(installed, tmp_path, "plan", "--hw", "cpu", "--stage", "sft")
    assert done.returncode == 0, done.stderr
    assert "cpu-tiny" in done.stdout and "sft" in done.stdout


def test_what_is_missing_is_installed_without_a_checkout(installed, tmp_path):
    code = "from rlhf.packages import install_command; print(install_command('gpu'))"
    done = run(installed.parent / "python", tmp_path, "-c", code)
    assert "bitsandbytes" in done.stdout and ">=0.50" in done.stdout and "'.[gpu]'" not in done.stdout
