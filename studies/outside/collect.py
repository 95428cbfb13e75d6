"""`python -m studies.outside.collect CLONE`: the measured figures of PEFT's comparison, from a clone of its repository.

Writes peft-metamath.json, which is committed: the figures, what is needed to rehearse each run, and where they stand.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from bench.reading import read
from studies.kinds import RunsSource

DATA = Path(__file__).parent / "peft-metamath.json"
FOLDER = "method_comparison/MetaMathQA"


class Training(TypedDict):
    """The keys of a run's settings that a rehearsal needs. None where the run had none."""

    optimizer_type: str
    optimizer_kwargs: dict[str, Any]  # of the optimizer's class, whatever it takes
    autocast_adapter_dtype: bool
    attn_implementation: str | None
    lr_scheduler: str | None


class RunMeasured(TypedDict):
    """What a run measured: bytes, tokens, wall seconds."""

    reserved_max: int
    reserved_99th: int
    reserved_average: int
    allocated_average: int
    tokens: int
    seconds: float


class PeftRun(TypedDict):
    """One run of the comparison."""

    file: str
    date: str
    versions: dict[str, str]
    peft_commit: str | None
    training: Training
    adapter: dict[str, Any]  # keyword arguments of peft's configuration, whatever its method takes
    trainable_parameters: int
    measured: RunMeasured


class PeftRuns(RunsSource):
    """The content of peft-metamath.json."""

    runs: list[PeftRun]


def runs() -> PeftRuns:
    """Return the content of peft-metamath.json."""
    return read(DATA, PeftRuns)


def main() -> None:
    """Read the last commit of the clone that is named as the argument."""
    clone = Path(sys.argv[1])
    commit = git(clone, "rev-parse", "HEAD").strip()
    files = git(clone, "ls-tree", "-r", "--name-only", commit, FOLDER).split()
    collected: list[PeftRun] = []
    for file in files:
        if file.startswith(f"{FOLDER}/results/") and file.endswith(".json"):
            result = _json(clone, commit, file)
            settings = f"{FOLDER}/experiments/{result['run_info']['experiment_name']}/adapter_config.json"
            adapter = _json(clone, commit, settings) if settings in files else {}
            collected.append(_run(result, adapter, file))
    content: PeftRuns = {
        "repository": "https://github.com/huggingface/peft",
        "commit": commit,
        "path": FOLDER,
        "licence": "Apache-2.0",
        "unit": "bytes, measured",
        "hardware": "NVIDIA L40S",
        "model": "meta-llama/Llama-3.2-3B, bfloat16, 4 rows, no gradient checkpointing, 5000 steps",
        "runs": collected,
    }
    DATA.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _run(result: dict[str, Any], adapter: dict[str, Any], file: str) -> PeftRun:
    about, trained = result["run_info"], result["train_info"]
    windows = [w for w in trained["metrics"] if "mem allocated avg" in w]
    seconds = sum(w["train time"] for w in windows)
    packages = result["meta_info"]["package_info"]
    return {
        "file": file.removeprefix(f"{FOLDER}/"),
        "date": about["created_at"][:10],
        "versions": {name: packages[f"{name}-version"] for name in ("torch", "transformers", "peft")},
        "peft_commit": packages["peft-commit-hash"],
        "training": _training(about["train_config"]),
        "adapter": {key: value for key, value in adapter.items() if value is not None},
        "trainable_parameters": trained["num_trainable_params"],
        "measured": {
            "reserved_max": trained["accelerator_memory_max"],
            "reserved_99th": trained["accelerator_memory_reserved_99th"],
            "reserved_average": trained["accelerator_memory_reserved_avg"],
            "allocated_average": round(sum(w["mem allocated avg"] for w in windows) / len(windows)),
            "tokens": round(sum(w["tokens / sec"] * w["train time"] for w in windows)),
            "seconds": round(seconds, 1),
        },
    }


def _training(settings: dict[str, Any]) -> Training:
    return {
        "optimizer_type": settings["optimizer_type"],
        "optimizer_kwargs": settings["optimizer_kwargs"],
        "autocast_adapter_dtype": settings["autocast_adapter_dtype"],
        "attn_implementation": settings.get("attn_implementation"),
        "lr_scheduler": settings.get("lr_scheduler"),
    }


def _json(clone: Path, commit: str, file: str) -> Any:
    return json.loads(git(clone, "show", f"{commit}:{file}"))


def git(clone: Path, *arguments: str) -> str:
    """Return what git prints for a clone."""
    return subprocess.run(["git", "-C", str(clone), *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
