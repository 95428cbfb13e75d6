"""One side of a comparison: runs stages with the code of a checkout, and prints what they cost as one JSON line.

It is started as a file, `python -P worker.py QUESTION`, with the checkout on PYTHONPATH, which may be older than this
file: it uses torch, the plan's `Counting`, `few_steps`, the command line of `rlhf`, and the names of phases. QUESTION
is JSON: `recipe` (its folder), `changes`, `stages` in their order, `steps`, `shape`, and `count`: whether operations
and bytes are counted, which takes time, or CPU seconds are taken.
"""

import gc
import json
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import rlhf
from rlhf import cli
from rlhf import recipe as recipes
from rlhf.plan.rehearsal.short_runs import few_steps
from rlhf.plan.rehearsal.work import Counting

PHASES = ("load", "evaluate", "references", "train", "rollout", "prefill", "decode", "score", "update", "merge")


def cost(arguments: list[str], count: bool) -> dict[str, dict[str, float]]:
    """Run a command. Return its figures by phase; "" is the whole stage."""
    gc.collect()
    counter: Any = Counting("cpu", PHASES, vocab_size=0) if count else nullcontext()
    start = time.process_time()
    with counter:
        cli.cli(arguments, standalone_mode=False)
    if not count:
        return {"": {"CPU s": time.process_time() - start}}
    return {
        phase: {
            "operations": peak.work.flops,
            "bytes moved": peak.work.moved,
            "launches": peak.work.launched,
            "peak memory": peak.bytes,
        }
        for phase, peak in counter.worked_peaks().items()
    }


def main() -> None:
    """Answer the question in the first argument."""
    asked = json.loads(sys.argv[1])
    printed = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a stage prints shall not stand beside the answer
    torch.set_num_threads(1)
    loaded = recipes.load(Path(asked["recipe"]), asked["changes"])
    changes = {**asked["changes"], **few_steps(loaded.recipe, asked["steps"], asked["shape"]), "hardware.threads": 1}
    settings = [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    found = {}
    with tempfile.TemporaryDirectory(prefix="rlhf-against-") as out:
        for stage in asked["stages"]:
            command = ["run", stage, "--recipe", asked["recipe"], "--out", out, "--no-preflight", *settings]
            found[stage] = cost(command, asked["count"])
    print(json.dumps({"root": str(Path(rlhf.__file__).parents[1]), "stages": found}), file=printed, flush=True)


if __name__ == "__main__":
    main()
