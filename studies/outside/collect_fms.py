"""`python -m studies.outside.collect_fms CLONE`: measured figures of fms-acceleration, from a clone of its repository.

Writes fms-acceleration.json, which is committed: the runs on one GPU that use neither the repository's own kernels nor
a mixture of experts, and that did not run out of memory.
"""

import csv
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import TypedDict

from bench.reading import read
from studies.kinds import PackedSource
from studies.outside.collect import git

DATA = Path(__file__).parent / "fms-acceleration.json"
FILE = "scripts/benchmarks/refs/a100_80gb.csv"
MODELS = ("mistralai/Mistral-7B-v0.1", "NousResearch/Llama-2-70b-hf")
METHODS_OF_FMS = {"none": "bfloat16", "baseline-peft-bnb": "nf4, prepared by peft", "accelerated-peft-bnb": "nf4"}


class PackedMeasured(TypedDict):
    """What a run measured."""

    peak_allocated: int  # bytes
    allocated: int  # bytes
    nvidia_mib: float
    tokens_per_second: float  # wall


class PackedRun(TypedDict):
    """One run of fms-acceleration."""

    model: str
    base: str  # bfloat16; nf4; nf4, prepared by peft
    method: str  # full or lora
    rows: int  # of a step, each of 4096 tokens
    measured: PackedMeasured


class PackedRuns(PackedSource):
    """The content of fms-acceleration.json."""

    runs: list[PackedRun]


def packed_runs() -> PackedRuns:
    """Return the content of fms-acceleration.json."""
    return read(DATA, PackedRuns)


def main() -> None:
    """Read the last commit of the clone that is named as the argument."""
    clone = Path(sys.argv[1])
    commit = git(clone, "rev-parse", "HEAD").strip()
    rows = csv.DictReader(git(clone, "show", f"{commit}:{FILE}").splitlines())
    content: PackedRuns = {
        "repository": "https://github.com/foundation-model-stack/fms-acceleration",
        "commit": commit,
        "path": FILE,
        "licence": "Apache-2.0",
        "unit": "bytes (nvidia_mib: MiB), measured",
        "hardware": "NVIDIA A100-SXM4-80GB",
        "versions": {
            "torch": "2.4.1",
            "transformers": "4.48.1",
            "trl": "0.13.0",
            "peft": "0.13.2",
            "bitsandbytes": "0.43.3",
        },
        "settings": "packed rows of 4096 tokens, gradient checkpointing, LoRA of rank 16 on q, k, v and o, AdamW",
        "runs": [_packed_run(row) for row in rows if _is_taken(row)],
    }
    DATA.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _is_taken(row: Mapping[str, str]) -> bool:
    """Return whether a row of the table is one of the runs that are compared."""
    known = row["model_name_or_path"] in MODELS and row["framework_config"] in METHODS_OF_FMS
    return row["num_gpus"] == "1" and known and bool(row["mem_peak_torch_mem_alloc_in_bytes"])


def _packed_run(row: Mapping[str, str]) -> PackedRun:
    return {
        "model": row["model_name_or_path"],
        "base": METHODS_OF_FMS[row["framework_config"]],
        "method": row["peft_method"] or "full",
        "rows": int(row["per_device_train_batch_size"]),
        "measured": {
            "peak_allocated": int(float(row["mem_peak_torch_mem_alloc_in_bytes"])),
            "allocated": int(float(row["mem_torch_mem_alloc_in_bytes"])),
            "nvidia_mib": float(row["mem_nvidia_mem_reserved"]),
            "tokens_per_second": float(row["train_tokens_per_second"]),
        },
    }


if __name__ == "__main__":
    main()
