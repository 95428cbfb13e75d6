"""Bytes of small runs of the recipes for a CPU: `python -m tests.digests [--write] [RUN …]`.

A run trains a recipe's stages with fewer rows and steps. The SHA-256 of its adapters, metrics and samples stand in
digests.json for each kind of processor, because kinds of processors round differently. Without --write they are
compared; the exit code is 1 where bytes differ, or where nothing is known of this kind of processor.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from rlhf.files import sha256

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".json")
KEPT = ("adapter/adapter_model.safetensors", "model/model.safetensors", "metrics.jsonl", "samples.jsonl")


class Run(NamedTuple):
    """Stages of a recipe at a small size."""

    recipe: str
    stages: tuple[str, ...]
    changes: str


DATA = "data.toy.documents=4000 data.toy.pairs=3000 pretrain.max_samples=2000 pretrain.max_eval_samples=64"
SFT = f"{DATA} sft.max_samples=400 sft.max_eval_samples=64 sft.save_steps=10"
RM = f"{SFT} rm.max_samples=800 rm.max_eval_samples=200 rm.logging_steps=10 rm.save_steps=20"
PAIRS = SFT + " {0}.max_samples=480 {0}.max_eval_samples=64 {0}.logging_steps=5 {0}.save_steps=10"
STEPS = " {0}.steps=4 {0}.save_steps=2 {0}.eval_steps=2 {0}.max_eval_samples=64 {0}.warmup_steps=1"
RUNS = {
    "tiny": Run("cpu-tiny/v2", ("ppo", "evaluate"), RM + STEPS.format("ppo") + " evaluate.max_samples=64"),
    "dpo": Run("cpu-tiny/v1", ("dpo",), PAIRS.format("dpo")),
    "kto": Run("cpu-tiny-kto/v1", ("kto",), PAIRS.format("kto")),
    "groups": Run("cpu-tiny-groups/v1", ("rloo", "grpo"), RM + STEPS.format("rloo") + STEPS.format("grpo")),
    "sums": Run(
        "cpu-smollm2-sums/v1", ("grpo",), "grpo.steps=2 grpo.save_steps=1 grpo.eval_steps=2 grpo.max_eval_samples=16"
    ),
}


def main() -> None:
    """Compare, or write with --write."""
    parser = argparse.ArgumentParser(prog="python -m tests.digests", description=__doc__)
    parser.add_argument("runs", nargs="*", choices=[[], *RUNS], metavar="RUN", help=f"{', '.join(RUNS)} [all of them]")
    parser.add_argument("--write", action="store_true", help="take the bytes of this code as those that are right")
    options = parser.parse_args()
    every = json.loads(FILE.read_text())
    known = every.setdefault(processor(), {})
    differ = []
    for name in options.runs or RUNS:
        found = digests(RUNS[name])
        if options.write:
            known[name] = found
            FILE.write_text(json.dumps(every, indent=1) + "\n")
        wanted = known.get(name, {})
        differ += [f"{name}/{file}" for file in sorted(found.keys() | wanted) if found.get(file) != wanted.get(file)]
        print(f"{name}: {len(found)} files", flush=True)
    print("\n".join(f"other bytes: {file}" for file in differ) or f"the bytes of {processor()} are as they were")
    sys.exit(bool(differ))


def processor() -> str:
    """The kind of this processor, as far as torch and its libraries choose kernels by it."""
    lines = dict(line.split("\t", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if "\t" in line)
    family = [lines.get(key, "?").strip(": \t") for key in ("vendor_id", "cpu family")]
    return " ".join([*family, torch.backends.cpu.get_cpu_capability()])


def digests(run: Run) -> dict[str, str]:
    """Train a run in a folder of its own. Return the SHA-256 of what it leaves, by file."""
    with tempfile.TemporaryDirectory(prefix="digests-") as out:
        for stage in run.stages:
            words = [sys.executable, "-P", "-m", "rlhf", "run", stage, "--recipe", str(ROOT / "recipes" / run.recipe)]
            words += ["--with-parents", "--out", out, *sets(run.changes)]
            subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ)
        folder = Path(out, run.recipe)
        files = sorted(file for name in KEPT for file in folder.glob(f"*/{name}"))
        return {str(file.relative_to(folder)): sha256(file) for file in files}


def sets(changes: str) -> Iterator[str]:
    """The options that make changes to a recipe."""
    for change in changes.split():
        yield from ("--set", change)


if __name__ == "__main__":
    main()
