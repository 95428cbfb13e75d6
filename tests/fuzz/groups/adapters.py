"""Adapters of a finished run: safetensors header, keys, shapes, values, adapter_config.json, files that are none."""

import pickle
from pathlib import Path
from random import Random
from typing import Any

import numpy
from safetensors.numpy import load_file, save_file

from tests.fuzz.groups.run_dirs import read, spoil
from tests.fuzz.mutate import damage
from tests.fuzz.oracle import SOUND, Case
from tests.fuzz.reference import Reference, finite_result, rehash


class Executed:
    """Unpickled, it makes the canary."""

    def __reduce__(self) -> tuple[Any, ...]:
        from tests.fuzz.oracle import CANARY

        return Path.touch, (Path(CANARY),)


def case(random: Random, place: Path, reference: Reference) -> Case:
    root = reference.copy(place / "out")
    stage = random.choice(("sft", "sft", "rm", "ppo", "dpo"))
    adapter = root / stage / "adapter"
    sound = random.random() < 2 * SOUND
    name, must = ("as it should be", "accept") if sound else spoil_adapter(random, adapter)
    known = random.random() < 0.75
    known = known and not sound
    if known:  # by one who knows that hashes are recorded
        rehash(root / stage)
    name = f"{stage}: {name}{', hashes made to fit' if known else ''}"
    readers = ["child", "child", "child"]
    readers += {"rm": ["score"]}.get(stage, ["chat"])
    if not known:
        readers += ["again"]
    found = read(random.choice(readers), random, place, root, reference, stage, name)
    ran = found.arguments[0] == "run"
    if sound:
        found.must = "accept"
    elif must == "refuse" or (ran and not known):
        found.must = "refuse"
    elif ran and must == "either":
        # A value that is a plausible number cannot be known to be another one: the result must be a number as well.
        made = root / found.arguments[1]
        found.valid = lambda outcome: None if made.name == "evaluate" else finite_result(made)
    return found


def spoil_adapter(random: Random, adapter: Path) -> tuple[str, Any]:
    """Damage an adapter; returns what was done, and "refuse", "either", or "same": the result must not change."""
    file, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    kind = random.randrange(13)
    tensors = load_file(file)
    key = random.choice(sorted(tensors))
    if kind == 0:
        tensors[key] = numpy.full_like(tensors[key], random.choice((numpy.nan, numpy.inf)))
        name = f"{key} is not finite"
    elif kind == 1:
        tensors[key].reshape(-1)[random.randrange(tensors[key].size)] = numpy.nan
        name = f"one NaN in {key}"
    elif kind == 2:
        del tensors[key]
        name = f"{key} is missing"
    elif kind == 3:
        tensors[f"{key}.more"] = tensors[key]
        name = "a key too many"
    elif kind == 4:
        tensors[key.replace("layers.0", "layers.7").replace("lora_A", "lora_Z")] = tensors.pop(key)
        name = f"{key} has another name"
        if key in tensors:
            return spoil_adapter(random, adapter)
    elif kind == 5:
        tensors[key] = random.choice(
            (tensors[key][:-1], tensors[key][..., :-1], tensors[key][None], tensors[key].T.copy())
        )
        name = f"{key} has the shape {tensors[key].shape}"
        if tensors[key].shape == load_file(file)[key].shape:
            return spoil_adapter(random, adapter)
    elif kind == 6:
        tensors = {}
        name = "no tensors"
    elif kind == 7:
        header = random.choice((b"\xff" * 8, (10**6).to_bytes(8, "little"), bytes(8), b""))
        file.write_bytes(header + file.read_bytes()[len(header) :][: random.choice((0, 10, 10**6))])
        return "a safetensors header that cannot be", "refuse"
    elif kind == 8:
        name, content = damage(random, file.read_bytes())
        file.write_bytes(content)
        return f"{file.name}, {name}", _damaged(file)
    elif kind == 9:
        pickled = pickle.dumps({"base_model.model.x": Executed()})
        if random.random() < 0.5:
            file.unlink()
            (adapter / "adapter_model.bin").write_bytes(pickled)
            return "a pickle as adapter_model.bin", "refuse"
        file.write_bytes(pickled)
        return "a pickle in place of the tensors", "refuse"
    elif kind == 10:
        target = random.choice((file, config))
        target.unlink()
        if random.random() < 0.5:
            target.mkdir()
        return f"{target.name} is missing or a folder", "refuse"
    else:
        return f"{config.name}, {spoil(random, config)}", "same"
    save_file(tensors, file, metadata={"format": "pt"})
    return name, "refuse"


def _damaged(file: Path) -> str:
    """Whether another reader finds the damage."""
    try:
        tensors = load_file(file)
    except Exception:
        return "refuse"
    return "either" if all(numpy.isfinite(tensor).all() for tensor in tensors.values()) else "refuse"
