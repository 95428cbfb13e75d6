"""The image's definition: pinned base, locks that belong to pyproject.toml, nothing in it that does not belong."""

import json
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from rlhf.cli import container
from rlhf.process.endings import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_base_is_pinned_by_digest_and_an_argument():
    (base,) = re.findall(r"^ARG BASE=(\S+)$", DOCKERFILE, flags=re.MULTILINE)
    assert re.fullmatch(r"debian:trixie-\d{8}-slim@sha256:[0-9a-f]{64}", base)
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.MULTILINE)[0] == "${BASE}"


def test_it_installs_by_hash_and_runs_as_another_user_than_root():
    assert "--require-hashes -r requirements/image.txt" in DOCKERFILE
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    assert users and not users[-1].startswith(("0", "root"))


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)(?:\[[^]]*\])?==([^\s;\\]+)", text, flags=re.MULTILINE))


def test_the_image_s_lock_has_the_versions_of_the_other_one():
    """And a hash for every package, CUDA's among them. torch and transformers differ, as lock.sh says."""
    image, here = ((ROOT / "requirements" / name).read_text() for name in ("image.txt", "cpu.txt"))
    for_python_312 = re.sub(r"^.*python_full_version < '3\.12'.*$", "", here, flags=re.MULTILINE)
    found, other = pins(image), pins(for_python_312)
    different = {name for name, version in found.items() if name in other and other[name] != version}
    assert different == {"torch", "transformers"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {wanted.name: wanted.specifier for wanted in map(Requirement, project["dependencies"])}
    assert all(ranges[name].contains(found[name]) for name in different)
    assert {"torch", "transformers", "trl", "peft", "bitsandbytes", "nvidia-cublas", "triton"} <= set(found)
    blocks = re.split(r"\n(?=[a-z0-9])", image)
    assert [block for block in blocks if "==" in block and "--hash=sha256:" not in block] == []


def test_docker_stop_reaches_the_command():
    """No shell stands between the engine and the process, and an init hands on signals and ends what is left."""
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", DOCKERFILE, flags=re.MULTILINE)
    assert json.loads(entry) == ["python", "-m", "rlhf.cli"]
    assert "STOPSIGNAL" not in DOCKERFILE, "SIGTERM, which a stage answers"
    assert "--init" in container._options("docker")
    assert PATIENCE < 10, "docker kills after 10 s"
