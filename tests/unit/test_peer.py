"""The comparison with the peer: medians, ratios, contenders that do not fit, and the peer's environment."""

import argparse
import importlib
import json
import mmap
import sys
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig

from bench.kinds import Contender, PeerRecord, Spread, StageSteps
from bench.peer import __main__ as peer
from bench.peer import contenders, environments, inputs, runs, supervised, training, trl_groups
from bench.peer.figures import contender_figures, markdown, phases_table
from bench.peer.inputs import BATCH, GROUP
from rlhf import recipe
from rlhf.errors import UserError
from rlhf.recipe import StageName
from tests.helpers import noted

PARTS: list[runs.ContenderRun] = [
    {"cpu": [4.0, 6.0], "wall": [8.0, 8.0], "growth": 300},
    {"cpu": [5.0, 5.0], "wall": [8.0, 40.0], "growth": 900},
    {"cpu": [5.0, 9.0], "wall": [8.0, 8.0], "growth": 400},
]


def record(figures: dict[str, Contender]) -> PeerRecord:
    return {
        "device": "a device",
        "date": "2026-01-01",
        "code": {"commit": "0123456789abcdef", "dirty": False},
        "model": {},
        "batch": BATCH,
        "prompt_tokens": [48, 80],
        "new_tokens": 64,
        "epochs": 4,
        "micro_batch": 8,
        "repeats": 3,
        "peer": "trl",
        "packages": {},
        "figures": figures,
        "floor": {"flops_per_second": 1e9, "flops_per_step": dict.fromkeys(runs.TIMED_PHASES, 1e9)},
    }


def test_figures_are_medians_over_all_steps_and_ratios_are_to_both_of_the_peers():
    ours: list[runs.ContenderRun] = [
        part | {"cpu": [2.0, 2.5], "growth": part["growth"] // 2, "phases": dict.fromkeys(runs.TIMED_PHASES, seconds)}
        for part, seconds in zip(PARTS, (0.5, 3.0, 0.8), strict=True)
    ]
    method = contenders.METHODS["ppo"]
    names = [*method.theirs, *method.ours]
    slower: list[runs.ContenderRun] = [part | {"cpu": [10.0]} for part in PARTS]
    figures = contender_figures(
        method, dict(zip(names, [PARTS, slower, *[ours] * len(method.ours)], strict=True)), "cpu"
    )
    assert figures[names[0]]["seconds_per_step"] == 5.0
    assert figures[names[0]]["seconds_range"] == [4.0, 9.0]
    assert figures[names[0]]["samples_per_second"] == BATCH / 8
    assert figures[names[2]]["times_faster"] == pytest.approx([5 / 2.25, 10 / 2.25])
    rounds = [[pytest.approx(low), pytest.approx(high)] for low, high in ((5 / 2.25, 7 / 2.25), (10 / 2.25, 10 / 2.25))]
    assert figures[names[2]]["times_faster_range"] == rounds, "of the medians of each round"
    assert figures[names[0]]["peak_over_loaded_bytes"] == 400
    assert figures[names[2]]["memory_ratio"] == [0.5, 0.5]
    assert "| 2.25 (2.00 to 2.50) |" in markdown(record(figures))
    assert "| CPU seconds per step" in markdown(record(figures)).replace("| | ", "| ")
    heading = " | ".join(f"{what} ÷ TRL (value model through LoRA)" for what in ("speed", "memory"))
    assert f"| {heading} |\n" in markdown(record(figures)), "to the design that is like one of ours"
    assert f"| {names[2]} | 2.25 (2.00 to 2.50) | {BATCH / 8:.2f} | 0 MiB | 4.44 | 0.50 |" in markdown(record(figures))
    assert "| update | 0.80 | 33% | 1 | 1.00 | 125% |" in phases_table(record(figures))


def test_of_our_steps_the_first_and_the_last_do_not_count():
    """The first warms up, the last also evaluates."""
    assert [row["step"] for row in runs.counted_steps([{"step": n} for n in (1, 2, 3, 4)])] == [2, 3]


def test_a_supervised_ratio_is_of_tokens_per_second_with_the_range_over_the_rounds():
    def repeat(tokens: float, seconds: float) -> StageSteps:
        spread: Spread = {"median": seconds, "low": seconds, "high": seconds, "n": 4}
        memory = {"train": round(tokens)}
        return {"clock": "cpu", "tokens_per_second": tokens, "step_seconds": spread, "phase_peak_bytes": memory}

    sides = {
        "ours": [repeat(400.0, 2.0), repeat(600.0, 1.0), repeat(500.0, 3.0)],
        "trl": [repeat(200.0, 5.0), repeat(250.0, 5.0), repeat(300.0, 5.0)],
        "trl, tuned": [repeat(500.0, 4.0), repeat(500.0, 4.0), repeat(500.0, 4.0)],
    }
    ours = supervised.side_by_side(sides)["ours"]
    assert (ours["times_faster"], ours["times_faster_tuned"]) == (2.0, 1.0)
    assert ours["times_faster_range"] == pytest.approx([5 / 3, 2.4])
    assert ours["times_faster_tuned_range"] == [0.8, 1.2]
    assert (ours["step_seconds"], ours["step_seconds_range"], ours["memory_ratio"]) == (2.0, [1.0, 3.0], 2.0)
    assert ours["memory_ratio_range"] == pytest.approx([5 / 3, 2.4]) and ours["memory_ratio_tuned"] == 1.0
    assert "1.00 (0.80 to 1.20)" in supervised._row("sft", "ours", ours)


def test_contenders_take_turns_in_both_orders(monkeypatch, tmp_path):
    done: list[str] = []

    def ran(name: str):
        return lambda *said: noted(done, name, {"cpu": [1.0], "wall": [1.0], "growth": 1})

    method: Any = contenders.Method(ours={"a": {}, "b": {}}, theirs={"c": []}, epochs=1)
    monkeypatch.setitem(contenders.METHODS, "grpo", method)
    monkeypatch.setattr(peer, "run_trl", ran("c"))
    monkeypatch.setattr(peer, "run_ours", lambda method, inputs, out, changes, *said: ran("ours")())
    for name in ("make_inputs_apart", "floor", "show"):
        monkeypatch.setattr(peer, name, lambda *_: None)
    said = ["--method", "grpo", "--repeats", "3", "--work", str(tmp_path / "work")]
    assert CliRunner().invoke(peer.main, said).exit_code == 0
    assert done == ["c", "ours", "ours", "ours", "ours", "c", "c", "ours", "ours"]


def test_ours_takes_a_step_more_which_evaluates(monkeypatch, tmp_path):
    (tmp_path / inputs.SETTINGS).write_text(json.dumps(inputs.settings_of("grpo", "cpu")))
    commands: list[list[str]] = []
    monkeypatch.setattr(runs, "_call", lambda command: noted(commands, command, ""))
    last = runs.prepare_ours("grpo", tmp_path, tmp_path / "out", {"hardware.trunk": "lean"}, 3, 8)
    assert [command[3:5] for command in commands] == [["run", "sft"]] and last[:2] == ["run", "grpo"]
    sets = {text for flag, text in pairwise(last) if flag == "--set"}
    assert {"grpo.steps=4", "grpo.per_device_train_batch_size=8", "hardware.trunk=lean"} <= sets


def test_no_contender_is_always_the_first(monkeypatch):
    """TRL's trainers have the rows of our first run, which therefore begins."""
    done: list[tuple[str, str]] = []

    def measured(short: object, stages: tuple[StageName], out: Path, **_: object) -> dict[StageName, StageSteps]:
        done.append(("ours", str(out)))
        return {stage: {"tokens_per_second": 1.0} for stage in stages}

    def trl(short: object, stage: StageName, out: str, settings: object, warm_up: int) -> StageSteps:
        done.append(("tuned" if settings else "trl", out))
        return {"tokens_per_second": 1.0}

    monkeypatch.setattr("bench.steps.measure_short", measured)
    monkeypatch.setattr(supervised, "_trl", trl)
    monkeypatch.setattr(supervised, "side_by_side", dict)
    found = supervised.compare(recipe.load(inputs.PEER_RECIPE), "sft", 3, 2)
    assert {name: len(rows) for name, rows in found.items()} == {"ours": 3, "trl": 3, "trl, tuned": 3}
    there, back = ["trl", "tuned"], ["tuned", "trl"]
    assert [name for name, _ in done] == ["ours", *there, *back, "ours", "ours", *there]
    assert len({out for _, out in done}) == 1, "in the folder of our first run"


def test_a_contender_that_does_not_fit_is_a_row():
    def full():
        raise runs.ContenderDidNotFit

    method = contenders.METHODS["ppo"]
    names = [*method.theirs, *method.ours]
    by_name = dict.fromkeys(names, PARTS) | {names[0]: [runs.attempt(full)]}
    figures = contender_figures(method, by_name, "wall")
    assert figures[names[0]] == {"out_of_memory": True}
    assert "times_faster" not in figures[names[2]]
    page = markdown(record(figures))
    assert f"| {names[0]} | out of memory |" in page
    assert "wall seconds per step" in page


@pytest.mark.parametrize(
    ("code", "said", "fits"),
    [
        (71, "error: ppo: out of memory on the GPU", False),  # ours
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", False),  # a script of the peer
        (0, "CUDA out of memory; a smaller batch is tried", True),
    ],
)
def test_what_does_not_fit_says_so_with_its_exit_code_or_in_torch_s_words(code, said, fits):
    command = [sys.executable, "-c", f"import sys; print({said!r}, file=sys.stderr); sys.exit({code})"]
    if fits:
        assert runs._call(command) == ""
    else:
        with pytest.raises(runs.ContenderDidNotFit):
            runs._call(command)


def test_the_peers_environment_is_made_once_with_our_versions(tmp_path, monkeypatch):
    commands = []

    def run(command, **options):
        commands.append([str(part) for part in command])
        return type("Done", (), {"returncode": 0})()

    def create(folder: Path, **options):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/python").touch()

    monkeypatch.setattr("bench.peer.environments.subprocess.run", run)
    monkeypatch.setattr("bench.peer.environments.venv.create", create)
    monkeypatch.setenv("PIP_ARGS", "--extra-index-url 'a place'")
    environments.peer_python(tmp_path / "env")
    (install,) = commands
    assert install[:4] == [str(tmp_path / "env/bin/python"), "-m", "pip", "install"]
    assert ["--extra-index-url", "a place", f"trl=={environments.TRL}"] == install[5:8]
    assert any(pin.startswith("torch==") and "+" not in pin for pin in install)
    environments.peer_python(tmp_path / "env")
    assert len(commands) == 2, "the second time it only looks whether TRL is there"
    assert f"version('trl').partition('+')[0] == '{environments.TRL}'" in commands[1][2]
    assert "version('torch').partition" in commands[1][2], "an upgrade of torch here makes it anew"


def test_a_record_names_the_packages_of_the_peer_s_environment():
    installed = environments.versions(Path(sys.executable))
    assert installed["torch"] == version("torch") and list(installed) == sorted(installed)


def test_torchtune_has_an_environment_of_its_own_and_no_part_in_the_ratios(tmp_path, monkeypatch):
    made: list[dict[str, str]] = []
    monkeypatch.setattr(environments, "_environment", lambda folder, packages, ours: noted(made, packages, folder))
    assert environments.torchtune_python(tmp_path) == tmp_path and made == [environments.TORCHTUNE]
    commands: list[list[str]] = []
    monkeypatch.setattr(runs, "_call", lambda command: noted(commands, command, '{"cpu": [1.0]}'))
    assert runs.run_torchtune(Path("python"), tmp_path, [], 3, 8) == {"cpu": [1.0]}
    (command,) = commands
    assert command[1].endswith("torchtune_ppo.py") and Path(command[1]).is_file()
    method = contenders.METHODS["ppo"]
    (name,) = method.torchtune
    figures = contender_figures(method, {**dict.fromkeys(method.theirs, PARTS), name: PARTS}, "cpu")
    assert figures[name]["times_faster"] == [1.0, 1.0], "its time is compared with TRL's two, and no other with its own"


@pytest.mark.parametrize("method", ["rloo", "grpo"])
def test_both_sides_of_a_method_without_a_critic_have_the_same_settings(method, tmp_path, monkeypatch):
    """Ours are those of the recipe, and so are the values with which TRL's trainer is configured."""
    compared = contenders.METHODS[method]
    for changes in compared.ours.values():
        assert all(key.startswith((f"{method}.", "hardware.trunk", "lora.layers")) for key in changes)
        overrides = recipe.parse_overrides([f"{key}={value}" for key, value in changes.items()])
        options = getattr(recipe.load(inputs.PEER_RECIPE, overrides).recipe, method)
        assert (options.batch_size, options.num_generations) == (BATCH, GROUP)
        assert options.num_iterations * options.num_mini_batches == compared.epochs
        said = argparse.Namespace(micro=8, steps=3, checkpointing=options.gradient_checkpointing)
        theirs = trl_groups.configuration(SimpleNamespace, said, inputs.settings_of(method, "cpu"))
        for name in ("num_generations", "num_iterations", "max_completion_length", "temperature", "beta"):
            assert getattr(theirs, name) == getattr(options, name), name
        assert (theirs.learning_rate, theirs.lr_scheduler_type) == (options.learning_rate, options.lr_scheduler_type)
        assert theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps == BATCH
        assert theirs.gradient_checkpointing == options.gradient_checkpointing
    commands: list[list[str]] = []
    monkeypatch.setattr(runs, "_call", lambda command: noted(commands, command, '{"cpu": [1.0]}'))
    for flags in compared.theirs.values():
        assert runs.run_trl(method, Path("python"), tmp_path, flags, 3, 8) == {"cpu": [1.0]}
    assert all(command[1].endswith("trl_groups.py") and method in command for command in commands)
    assert [("--checkpointing" in command) for command in commands] == [False, True]


def test_both_peers_of_ppo_have_the_settings_of_the_recipe(tmp_path, monkeypatch):
    """The scripts import what their environments have; here a stand-in takes the values."""
    known = SimpleNamespace(PPOConfig=SimpleNamespace, PPOTrainer=None, OmegaConf=SimpleNamespace(create=dict))
    for name in ("trl.experimental.ppo", "torchtune", "omegaconf"):
        monkeypatch.setitem(sys.modules, name, known)
    trl_ppo, torchtune_ppo = (importlib.import_module(f"bench.peer.{name}") for name in ("trl_ppo", "torchtune_ppo"))
    ours = recipe.load(inputs.PEER_RECIPE).recipe
    options, settings = ours.options(recipe.Ppo), inputs.settings_of("ppo", "cpu")
    assert options.batch_size == BATCH and options.num_ppo_epochs == contenders.METHODS["ppo"].epochs
    assert settings["lora"] == {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear"}
    theirs = trl_ppo.configuration(8, 3, settings)
    for key in ("num_ppo_epochs", "num_mini_batches", "response_length", "temperature", "kl_coef", "gamma", "lam"):
        assert getattr(theirs, key) == getattr(options, key), key
    for key in ("cliprange", "cliprange_value", "vf_coef", "learning_rate", "gradient_checkpointing"):
        assert getattr(theirs, key) == getattr(options, key), key
    assert (theirs.total_episodes, theirs.gradient_accumulation_steps) == (3 * BATCH, BATCH // 8)
    (tmp_path / "base").mkdir()
    (tmp_path / inputs.SETTINGS).write_text(json.dumps(settings))
    sizes: dict[str, Any] = {**inputs.PEER_SIZES["tiny"]}
    (tmp_path / "base/config.json").write_text(LlamaConfig(**sizes).to_json_string(use_diff=False))
    second = torchtune_ppo.configuration(tmp_path, tmp_path, 3, 8)
    assert (second["num_steps"], second["batch_size"], second["gradient_accumulation_steps"]) == (3 * BATCH, BATCH, 4)
    assert (second["ppo_epochs"], second["max_generated_tokens"]) == (options.num_ppo_epochs, options.response_length)
    assert (second["gamma"], second["lmbda"], second["kl_coeff"]) == (options.gamma, options.lam, options.kl_coef)
    assert second["optimizer"]["lr"] == options.learning_rate
    assert (second["loss"]["epsilon"], second["loss"]["value_coeff"]) == (options.cliprange, options.vf_coef)


def test_steps_after_the_warm_up_and_the_growth_of_memory_are_counted(monkeypatch):
    """Three steps of 1, 2 and 3 s; a block of 64 MiB that is freed before training ends is in the peak."""
    clock, now = training.StepClock(), iter([0.0, 1.0, 3.0, 6.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))

    class Trainer:
        def train(self):
            for tokens in (700, 900, 1000):  # of which the first step, with the longest rows, has most
                clock.on_step_end(None, SimpleNamespace(num_input_tokens_seen=tokens), None)
            with mmap.mmap(-1, 2**26) as block:  # new pages, which a tensor in memory that was freed before has not
                for page in range(0, 2**26, mmap.PAGESIZE):
                    block[page] = 1

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    taken = training.timed(Trainer(), clock, cuda=False, warm_up=1)
    assert taken["wall"] == [2.0, 3.0] and len(taken["cpu"]) == 2
    assert clock.tokens_after(1) == 300, "tokens and seconds are of the same steps"
    assert 0.95 * 2**26 < taken["growth"] < 2**27  # what is freed elsewhere is less than 5 %


def test_a_folder_of_other_files_is_not_emptied(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds other files; name a new folder"):
        environments.peer_python(tmp_path)
    ran = CliRunner().invoke(peer.main, ["--method", "grpo", "--work", str(tmp_path)])
    assert isinstance(ran.exception, UserError) and (tmp_path / "thesis.txt").exists()
