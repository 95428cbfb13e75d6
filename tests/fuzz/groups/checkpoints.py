"""Checkpoints of a stage that was stopped: records, tensors, pickles, names; then `--resume`."""

import hashlib
import json
import pickle
import shutil
from pathlib import Path
from random import Random
from typing import Any

from rlhf.run.logs import LOGS
from tests.fuzz.groups.adapters import Executed, spoil_adapter
from tests.fuzz.groups.run_dirs import same_result, spoil
from tests.fuzz.mutate import damage, leaves, nasty
from tests.fuzz.oracle import SOUND, Case
from tests.fuzz.reference import Reference, finite_result

STAGES = ("pretrain", "sft", "rm", "ppo", "dpo")
NAMES = (
    "step-abc",
    "step-",
    "step--1",
    "step-1e3",
    "step-000002.bak",
    "step-9999999",
    "step-000000",
    "step-٣",
    "step-\x1b[31m",
    "step-" + "9" * 60,
    "other",
    ".partial-3",
    "step-000003 (copy)",
)


def case(random: Random, place: Path, reference: Reference) -> Case:
    stage = random.choice(STAGES)
    folder = reference.begun(place / "out", stage)
    steps = sorted((folder / "checkpoints").glob("step-*"))
    kind = random.random()
    sealed = False
    sound = random.random() < SOUND
    if sound:
        name = "as it should be"
    elif kind < 0.15:
        name = _odd_folder(random, folder / "checkpoints", steps[-1])
    elif kind < 0.35:
        target = random.choice([*folder.glob("*.json*"), *folder.glob("checkpoints/*.json")])
        name = f"{target.relative_to(folder)}: {spoil(random, target)}"
        sealed = target.suffix == ".jsonl"  # figures of the log are not hashed
    elif kind < 0.45:
        name = f"checkpoint.json: {spoil(random, steps[-1] / 'checkpoint.json')}"
    else:
        chosen = [steps[-1]] if random.random() < 0.6 else steps
        sealed = random.random() < 0.6
        state = random.getstate()
        for step in chosen:
            random.setstate(state)  # the same damage in each
            name = _spoil(random, step)
            if sealed:
                seal(step)
        name += (
            f" in {'the newest' if len(chosen) == 1 else 'every'} checkpoint{', hashes made to fit' if sealed else ''}"
        )
    found = Case(f"run {stage} --resume, {name}", ["run", stage, *reference.options(), "--resume"], place)
    # The manifest says how the run was started last; what was logged after the checkpoint is made again.
    found.rewritten = ("manifest.json", *LOGS)
    found.must = "accept" if sound else "either"
    if sealed:  # a state that is a plausible number cannot be known to be another one
        found.valid = lambda outcome: finite_result(folder)
    else:
        found.valid = lambda outcome: same_result(folder, reference.root / stage)
    return found


def seal(folder: Path) -> None:
    """Write the hashes of a checkpoint anew, as one who tampers with it could."""
    file = folder / "checkpoint.json"
    try:
        record = json.loads(file.read_text())
        record["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # the record itself is what was damaged
    inside = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != file]
    record["sha256"] = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in inside}
    file.write_text(json.dumps(record))


def _spoil(random: Random, step: Path) -> str:
    """Damage one file of a checkpoint; returns what was done."""
    target = random.choice([path for path in sorted(step.rglob("*")) if path.is_file() and path.name != "README.md"])
    name = str(target.relative_to(step))
    kind = random.random()
    if kind < 0.1:
        target.unlink()
        return f"{name} is missing"
    if kind < 0.2:
        target.write_bytes(pickle.dumps({"step": Executed(), "random": [Executed()]}))
        return f"{name} is a pickle that would run something"
    if target.suffix in (".pt", ".pth") and kind < 0.75:
        return f"{name}: {_spoil_state(random, target)}"
    if target.suffix == ".json" and target.name != "tokenizer.json" and kind < 0.8:
        return f"{name}: {spoil(random, target)}"
    if target.name == "adapter_model.safetensors" and kind < 0.8:
        return f"{name}: {spoil_adapter(random, target.parent)[0]}"
    said, content = damage(random, target.read_bytes())
    target.write_bytes(content)
    return f"{name}: {said}"


def _spoil_state(random: Random, file: Path) -> str:
    """Change one value of a state that torch saved."""
    import torch

    state = torch.load(file, weights_only=False)
    plain = state if isinstance(state, dict) else dict(state)
    paths = [path for path in leaves(plain) if len(path) < 5]
    path = random.choice(paths)
    inner = plain
    for key in path[:-1]:
        inner = inner[key]
    old = inner[path[-1]]
    if random.random() < 0.3:
        del inner[path[-1]]
        said = "deleted"
    elif isinstance(old, torch.Tensor) and random.random() < 0.7:
        changes: dict[str, Any] = {
            "of another shape": torch.zeros([*old.shape, 2], dtype=old.dtype),
            "shorter": old.reshape(-1)[:-1].clone(),
            "NaN": torch.full_like(old, float("nan")) if old.is_floating_point() else torch.zeros(3),
            "text": "tensor",
            "of another type": old.to(torch.complex64) if old.is_floating_point() else old.to(torch.float64),
        }
        said, inner[path[-1]] = random.choice(list(changes.items()))
    else:
        said, inner[path[-1]] = nasty(random, None if isinstance(old, torch.Tensor | dict | list) else old)
        said = f"= {said}"
    torch.save(plain, file)
    return f"{'.'.join(map(str, path))} {said}"


def _odd_folder(random: Random, checkpoints: Path, newest: Path) -> str:
    """Something besides the checkpoints that is none, or one that is no folder."""
    name = random.choice(NAMES)
    kind = random.randrange(5)
    if kind == 0:
        shutil.copytree(newest, checkpoints / name, dirs_exist_ok=True)
        return f"a copy of a checkpoint named {name!r}"
    if kind == 1 and not (checkpoints / name).exists():
        (checkpoints / name).write_bytes(b"a file")
        return f"a file named {name!r}"
    if kind == 2 and not (checkpoints / name).exists():
        (checkpoints / name).mkdir()
        return f"an empty folder named {name!r}"
    if kind == 3:
        shutil.rmtree(newest)
        newest.symlink_to(newest.name)
        return "the newest checkpoint is a link to itself"
    shutil.rmtree(newest)
    newest.write_bytes(b"a file")
    return "the newest checkpoint is a file"
