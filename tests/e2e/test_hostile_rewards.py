"""A run has the same bytes whatever the user's reward functions do, and whatever a tracker does to the generators."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from rlhf.observe import tracking
from tests.helpers import beside, grouped, run_stages

STAGE = Path("cpu-tiny/v1/grpo")
# What each of the functions does at every call, before it returns its numbers.
HOSTILE = {
    "generators": "random.seed(42); np.random.seed(42); torch.manual_seed(42)",
    "numbers": "torch.rand(3); np.random.rand(3); random.random(); random.shuffle(completions)",
    "folder": "os.chdir('/')",
    "lists": "prompts.clear(); completion_ids.clear(); completions.reverse()",
    "child": "os.fork()",
    "child_that_exits": "os.fork() or sys.exit(1)",
    "child_that_raises": "os.fork() or 1 / 0",
}
MODULE = """
import os, random, sys
import numpy as np
import torch
def of(texts): return [len(text) % 5 / 7 for text in texts]
"""
FUNCTION = """
def {name}(prompts, completions, completion_ids, **_):
    results = of(completions)
    {code}
    return results
"""


@contextmanager
def seeding_trackers(*_: object) -> Iterator[list[tracking.Log]]:
    """A tracker that seeds every generator when it starts, and at each row."""

    def log(step: int = 0, values: object = None) -> None:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)

    log()
    yield [log]


def test_a_run_is_as_without_what_its_rewards_do(trained, tmp_path, monkeypatch):
    results = []
    for kind in ("kind", "hostile"):
        folder = tmp_path / kind
        folder.mkdir()
        functions = (FUNCTION.format(name=n, code=code if kind == "hostile" else "") for n, code in HOSTILE.items())
        (folder / "mine.py").write_text(MODULE + "".join(functions))
        for name in ("datasets", "trl", "safetensors", "not_installed"):  # taken for libraries by a careless process
            (folder / f"{name}.py").write_text("raise SystemError\n")
        monkeypatch.chdir(folder)
        if kind == "hostile":
            monkeypatch.setattr(tracking, "trackers", seeding_trackers)
        section = {"reward_funcs": [f"mine:{name}" for name in HOSTILE], "normalize_scores": False}
        section |= {"steps": 2, "save_steps": 2, "eval_steps": 1}
        run_stages(grouped("grpo", section), beside(trained, folder / "out", "pretrain", "sft"), "grpo")
        results.append(bytes_of(folder / "out" / STAGE))
    assert results[0].keys() == results[1].keys() and len(results[0]) >= 6
    assert [name for name, content in results[0].items() if results[1][name] != content] == []


def bytes_of(stage: Path) -> dict[str, bytes]:
    """The bytes of a stage's files, without those that hold times and paths."""
    timed = ("manifest.json", "summary.json", "telemetry.jsonl", "checkpoint.json")
    files = (file for file in sorted(stage.rglob("*")) if file.is_file() and file.name not in timed)
    return {str(file.relative_to(stage)): file.read_bytes() for file in files}
