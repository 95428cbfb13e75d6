"""The finished chain that cases start from: the released CPU recipe at sizes at which a stage takes a second."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from rlhf.recipe.strict import with_overrides
from rlhf.run.layout import CARD
from tests.fuzz import sandbox
from tests.helpers import RECIPE, SMALL

STAGES = ("pretrain", "sft", "rm", "ppo", "dpo", "evaluate", "merge")
SIZES: dict[str, Any] = SMALL | {
    "data.toy.documents": 64,
    "data.toy.pairs": 96,
    "pretrain.max_steps": 4,
    "pretrain.logging_steps": 1,
    "pretrain.save_steps": 1,
    "pretrain.max_eval_samples": 4,
    **{
        f"{stage}.{key}": value
        for stage in ("sft", "rm", "dpo")
        for key, value in {"max_samples": 32, "max_eval_samples": 4, "logging_steps": 1, "save_steps": 1}.items()
    },
    "ppo.steps": 4,
    "ppo.norm_responses": 8,
    "ppo.max_eval_samples": 4,
    "evaluate.max_samples": 4,
    "evaluate.batch_size": 4,
}
ROOT = Path("tiny/v1")  # of the runs, below --out


def write_recipe(folder: Path) -> Path:
    """A recipe of its own with these sizes, so that cases need no forty `--set`; returns its directory."""
    directory = folder / "recipes" / ROOT
    directory.mkdir(parents=True)
    content = with_overrides(yaml.safe_load((RECIPE / "recipe.yaml").read_text()), SIZES)
    # Text of several lines would hide the key that a mutation hits: one key, one line.
    (directory / "recipe.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    shutil.copy(RECIPE / "published.yaml", directory)
    return directory


class Reference:
    """Where the recipe and its finished runs are. Cases copy what they damage."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.recipe = write_recipe(folder)
        self.out = folder / "out"
        self.root = self.out / ROOT

    def options(self, out: Path | str = "out") -> list[str]:
        return ["--recipe", str(self.recipe), "--out", str(out)]

    def run(self, stage: str) -> None:
        """Run one stage of the chain. Raises RuntimeError where it fails."""
        outcome = sandbox.run(["run", stage, *self.options()], self.folder)  # relative, as in every case
        if outcome.code or outcome.stopped:
            raise RuntimeError(f"the reference's {stage} failed: {outcome.err.decode(errors='replace')[-2000:]}")

    def make(self, *stages: str) -> None:
        for stage in stages or STAGES:
            self.run(stage)
        if (self.root / "evaluate").exists():
            _rate(self.root)

    def copy(self, out: Path, *stages: str, checkpoints: tuple[str, ...] = ()) -> Path:
        """Copy the named stages (default: all) to another `--out`; returns its root. Links would share damage."""
        root = out / ROOT
        root.mkdir(parents=True)
        skipped = shutil.ignore_patterns("step-*")
        for name in stages or ("data", *STAGES, "ab"):
            if (self.root / name).exists():
                shutil.copytree(self.root / name, root / name, ignore=None if name in checkpoints else skipped)
        return root

    def before(self, out: Path, stage: str) -> Path:
        """A copy in which everything that `stage` reads is finished, and nothing else; returns its root."""
        needs = {"evaluate": ("ppo", "dpo"), "merge": ("ppo",)}.get(stage, ())
        earlier = [name for name in STAGES[: STAGES.index(stage)] if name not in ("ppo", "dpo", "evaluate")]
        if earlier:
            return self.copy(out, "data", *earlier, *needs)
        (out / ROOT).mkdir(parents=True)
        return out / ROOT

    def begun(self, out: Path, stage: str) -> Path:
        """A copy in which `stage` was stopped after its last checkpoint; returns the stage's directory."""
        root = self.before(out, stage)
        shutil.copytree(self.root / stage, root / stage)
        (root / stage / "summary.json").unlink()
        for result in ("adapter", "model"):
            shutil.rmtree(root / stage / result, ignore_errors=True)
        return root / stage


def results(stage: Path) -> dict[str, bytes]:
    """The bytes of what a stage hands on, without the page about it, which a later evaluation changes."""
    found = [file for folder in ("adapter", "model") for file in sorted((stage / folder).rglob("*")) if file.is_file()]
    return {str(file.relative_to(stage)): file.read_bytes() for file in found if file.name != CARD}


def changed_results(stage: Path, reference: Path) -> list[str]:
    """The files of a result that the reference does not have like this."""
    ours, theirs = results(stage), results(reference)
    name = "adapter/adapter_config.json"
    if name in ours and name in theirs:  # it names the folder of the base, which is elsewhere
        ours[name], theirs[name] = (_without_base(content) for content in (ours[name], theirs[name]))
    return sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))


def _without_base(config: bytes) -> bytes:
    try:
        content = json.loads(config)
        content.pop("base_model_name_or_path")
    except (ValueError, AttributeError, KeyError):
        return config
    return json.dumps(content).encode()


def metrics(stage: Path) -> Any:
    """The metrics in a stage's summary; None where there is none."""
    file = stage / "summary.json"
    return json.loads(file.read_text())["metrics"] if file.exists() else None


def finite_result(stage: Path) -> str | None:
    """Why a finished stage's result cannot be right, or None: tensors and metrics must be finite numbers."""
    import numpy
    from safetensors.numpy import load_file

    if not (stage / "summary.json").is_file():
        return "there is no summary"
    summary = json.loads((stage / "summary.json").read_text(), parse_constant=lambda name: name)
    weights = [*stage.glob("adapter/*.safetensors"), *stage.glob("model/*.safetensors")]
    if not weights:
        return "there are no weights"
    for file in weights:
        for name, tensor in load_file(file).items():
            if not numpy.isfinite(tensor).all():
                return f"{file.name} has NaN or infinity in {name}"
    for name, value in summary["metrics"].items():
        if isinstance(value, str) or (value is None and not name.endswith("_sd")):  # no spread: no gain in units of it
            return f"{name} is {value}"
    return None


def _rate(root: Path) -> None:
    """Verdicts of two raters on every pair of answers, as `rlhf ab` writes them."""
    from rlhf.rating import store
    from rlhf.rating.pairs import pair_answers

    found = pair_answers(root)
    found.file.parent.mkdir(exist_ok=True)
    by_rater: dict[str, list[store.Choice]] = {"anna": ["a", "b", "tie", "skip"], "judge:m": ["b", "b", "a", "tie"]}
    rows = [
        store.new_line(pair, rater, choice, "ab")
        for rater, choices in by_rater.items()
        for pair, choice in zip(found.pairs, choices, strict=False)
    ]
    found.file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rehash(stage: Path) -> None:
    """Write the hashes of a finished stage's result anew, as one who tampers with it could."""
    file = stage / "summary.json"
    summary = json.loads(file.read_text())
    summary["result_sha256"] = {name: hashlib.sha256(content).hexdigest() for name, content in results(stage).items()}
    file.write_text(json.dumps(summary))
