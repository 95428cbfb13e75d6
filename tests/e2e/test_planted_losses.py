"""The benchmark from end to end: real steps in processes of their own, and losses that were planted in them."""

import sys
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import compare, steps
from bench.kinds import StepsRecord
from bench.reading import read
from rlhf import recipe
from rlhf.cli import guarded
from tests.helpers import RECIPE, SMALL

SIZES = {key: value for key, value in SMALL.items() if not key.startswith(("pretrain.", "data.toy."))}

# What a commit might do by accident, at every call of attention: take a while longer, or keep what it made.
PLANTED = {
    "nothing": "pass",
    "slow-down": "end = time.perf_counter() + 0.1\n    while time.perf_counter() < end: pass",
    "leak": "kept.append(torch.ones(2**20))",
}
PLANT = """
import time
import torch
import torch.nn.functional as F

attention, kept = F.scaled_dot_product_attention, []

def planted(*arguments, **options):
    {body}
    return attention(*arguments, **options)

F.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention = planted
"""


def record(tmp_path: Path, planted: str, monkeypatch) -> StepsRecord:
    """Steps of SFT with something planted in the process that takes them."""
    root = tmp_path / planted
    root.mkdir()
    (root / "sitecustomize.py").write_text(PLANT.format(body=PLANTED[planted]))
    monkeypatch.setenv("PYTHONPATH", str(root))
    loaded = recipe.load(RECIPE, SIZES)
    return {
        "recipe": "cpu-tiny",
        "version": "v1",
        "recipe_sha256": "0",
        "date": "2026-01-01",
        "shape": "hh",
        "steps": 12,
        "code": {"commit": None, "dirty": None},
        "packages": {},
        "python": "",
        "device": {"type": "cpu", "name": "cpu"},
        "ceilings": {"flops": 1.0, "bandwidth": 1.0},
        "stages": steps.measure(loaded, ("sft",), root / "runs", steps=12, shape="hh"),
    }


@pytest.mark.slow
def test_a_planted_slow_down_and_a_planted_leak_are_caught(tmp_path, monkeypatch):
    """Attention runs 2 layers x 2 micro-batches a step at least: 400 ms more of a step, 4 MiB kept at every call.

    A busy machine adds less than that to a step.
    """
    before = record(tmp_path, "nothing", monkeypatch)
    slow, leak = (
        [loss.line() for loss in compare.losses(before, record(tmp_path, planted, monkeypatch))]
        for planted in ("slow-down", "leak")
    )
    assert [line for line in slow if line.startswith("sft/train: +")], slow
    assert [line for line in leak if line.startswith("sft: memory grows in every step")], leak
    assert not [line for line in slow if "memory" in line]


@pytest.mark.slow
def test_the_command_writes_a_record(tmp_path, monkeypatch, capsys):
    out = tmp_path / "record.json"
    changes = [part for key, value in SIZES.items() for part in ("--set", f"{key}={recipe.as_yaml(value)}")]
    arguments = ["--hw", "cpu", "--stage", "sft", "--steps", "2", "--shape", "longest", "--out", str(out), *changes]
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as stop:
        guarded(bench.main)
    assert not stop.value.code
    written = read(out, StepsRecord)
    row = written["stages"]["sft"]
    assert (written.get("modified"), written.get("overrides")) == (True, SIZES), "it says what was changed"
    assert row["step_seconds"]["n"] == 2 and row["tokens_per_second"] > 0
    assert row["mfu"] and 0 < row["mfu"] < 1 and (row["predicted_peak_bytes"] or 0) > 0
    assert "sft" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["bench", *arguments, "--save"])
    with pytest.raises(SystemExit) as stop:
        guarded(bench.main)
    assert stop.value.code == 1
    assert "only an unchanged recipe makes a record" in capsys.readouterr().err
