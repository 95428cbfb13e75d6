"""A recipe for a GPU runs in the image: a stand-in for the engine records its command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = """#!{python}
import json, os, sys
with open({log!r}, "a") as log: print(json.dumps(sys.argv), file=log)
if sys.argv[1] == "info": sys.exit({info})
if sys.argv[1] in ("build", "pull"): open({image!r}, "w").close()
if sys.argv[1] == "image": print("sha256:abc") if os.path.exists({image!r}) else sys.exit(1)
"""


class Machine:
    """A machine with an engine that only writes down what it is asked."""

    def __init__(self, folder: Path):
        self.folder, self.log = folder, folder / "log"
        (folder / "bin").mkdir()
        self.environment = {
            name: value for name, value in os.environ.items() if name not in ("RLHF_RUNTIME", "RANK", "HF_HOME")
        } | {"PATH": f"{folder}/bin", "HOME": str(folder), "XDG_CACHE_HOME": "", "PYTHONPATH": str(ROOT)}

    def install(self, engine: str = "docker", info: int = 0, image: bool = True) -> None:
        image_file = self.folder / "image"
        if image:
            image_file.touch()
        text = ENGINE.format(python=sys.executable, log=str(self.log), image=str(image_file), info=info)
        (self.folder / "bin" / engine).write_text(text)
        (self.folder / "bin" / engine).chmod(0o755)

    def rlhf(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "rlhf.cli", *words]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment | environment, capture_output=True, text=True, input=""
        )

    def asked(self) -> list[list[str]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line)[1:] for line in lines]


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


RUN = ("run", "ppo", "--recipe", str(ROOT / "recipes/4090-llama2-7b/v3"), "--out", "there")


def test_the_same_words_run_in_the_image(machine):
    machine.install()
    (machine.folder / "my_rewards.py").touch()
    done = machine.rlhf(*RUN, "--set", "ppo.steps=7", RLHF_IMAGE="mine", HF_TOKEN="secret")
    assert (done.returncode, done.stderr) == (0, "")
    *_, words = machine.asked()
    at = words.index("mine")
    assert words[0] == "run" and words[at + 1 :] == [*RUN, "--set", "ppo.steps=7"]
    options = words[1:at]
    hub, out = machine.folder / ".cache/huggingface", machine.folder / "there"
    assert {f"-v={path}:{path}" for path in (hub, out)} <= {*options} and out.is_dir() and hub.is_dir()
    recipes, rewards = ROOT / "recipes", machine.folder / "my_rewards.py"
    assert {f"-v={path}:{path}:ro" for path in (recipes, rewards)} <= {*options}
    assert {"--gpus=all", "-e=HF_TOKEN", "-e=RLHF_IMAGE=sha256:abc", f"-w={machine.folder}", "-i"} <= {*options}
    assert f"--user={os.getuid()}:0" in options and not [word for word in options if "secret" in word]


def test_the_image_of_the_checkout_is_built_if_it_is_missing(machine):
    machine.install("podman", image=False)
    done = machine.rlhf(*RUN, "--runtime", "podman", PATH=f"{machine.folder}/bin:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    asked = machine.asked()
    (build,) = [words for words in asked if words[0] == "build"]
    name = build[build.index("-t") + 1]
    assert build[-1] == str(ROOT) and any(word.startswith("COMMIT=") for word in build)
    assert asked[-1][0] == "run" and name in asked[-1] and "--userns=keep-id" in asked[-1]


@pytest.mark.parametrize(("installed", "info"), [(None, 0), ("docker", 1)])
def test_without_an_engine_the_way_out_is_named(machine, installed, info):
    if installed:
        machine.install(installed, info)
    done = machine.rlhf(*RUN)
    assert done.returncode == 1 and "docker" in done.stderr and "--runtime local" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (("run", "sft", "--recipe", str(ROOT / "recipes/cpu-tiny/v2"), "--set", "sft=null", "--if-needed"), {}),
        ((*RUN, "--runtime", "local"), {}),
        (RUN, {"RLHF_RUNTIME": "local"}),
        (RUN, {"RLHF_INSIDE": "1"}),
        (RUN, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}),
    ],
)
def test_a_recipe_for_a_cpu_and_what_is_local_ask_no_engine(machine, words, environment):
    machine.install()
    machine.rlhf(*words, **environment)
    assert machine.asked() == []


@pytest.mark.parametrize(("option", "value"), [("--set", "ppo.stepps=1"), ("--runtime", "dockr"), ("--seed", "x")])
def test_a_wrong_value_is_refused_before_the_engine_is_asked(machine, option, value):
    machine.install(image=False)
    done = machine.rlhf(*RUN, option, value)
    assert done.returncode == 2 and machine.asked() == [] and value.partition("=")[0] in done.stderr
