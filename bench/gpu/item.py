"""`python -m bench.gpu.item NAME RECORD`: runs one item of the plan in a separate process.

The record is written when the item starts and after every figure, so that an item that is cut off loses only what it
was measuring.
"""

import importlib
import os
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import click

from bench import provenance
from bench.gpu import plan, record
from bench.gpu.plan import GpuItem
from bench.gpu.record import GpuRecord
from bench.gpu.smi import used_bytes
from bench.paths import ROOT
from rlhf import recipe as recipes
from rlhf.files import JsonValue, write_json
from rlhf.recipe import Changes, PinnedRecipe
from rlhf.recipe.small import random_weights_changes

if TYPE_CHECKING:
    import torch

# A dry run takes the CPU recipe with a model and batches so small that only the code is tried.
TINY: Changes = {
    "model.architecture.hidden_size": 32,
    "model.architecture.intermediate_size": 64,
    "model.architecture.num_hidden_layers": 2,
    "model.architecture.num_attention_heads": 4,
    "model.architecture.num_key_value_heads": 2,
    "tokenizer.vocab_size": 261,  # the smallest that can be trained
    "lora.r": 4,
    "ppo.batch_size": 4,
    "ppo.rollout_batch_size": 4,
    "ppo.per_device_train_batch_size": 2,
    "ppo.max_prompt_length": 12,
    "ppo.response_length": 12,
    "evaluate.max_prompt_length": 12,
    "evaluate.response_length": 12,
    "evaluate.batch_size": 4,
    **{f"{stage}.max_length": 24 for stage in ("sft", "rm", "dpo")},
    **{f"{stage}.max_prompt_length": 12 for stage in ("sft", "rm", "dpo")},
    **{f"{stage}.per_device_train_batch_size": 2 for stage in ("sft", "rm", "dpo")},
    **{f"{stage}.max_eval_samples": 4 for stage in ("sft", "rm", "ppo", "dpo")},
}


FiguresT = TypeVar("FiguresT")  # one of the types in bench/gpu/measured.py


class Context(Generic[FiguresT]):
    """The argument of an item's function: its recipe, the device, a scratch folder, and the record to fill.

    `measured` is what has been measured so far; `save()` puts it on disk.
    """

    def __init__(self, item: GpuItem, dry_run: bool, scratch: Path, file: Path | None = None):
        self.item, self.dry_run, self.scratch = item, dry_run, scratch
        self.loaded = load(item, dry_run)
        self.record = record.new_record(item, dry_run, self.loaded)
        self.measured = cast(FiguresT, self.record["measured"])
        self._file = file
        self.save()

    @property
    def device(self) -> "torch.device":
        """Return the GPU, or the CPU in a dry run."""
        import torch

        return torch.device("cpu" if self.dry_run else "cuda")

    @property
    def recipe(self) -> PinnedRecipe:
        """Return the item's unchanged recipe, or the tiny one in a dry run."""
        assert self.loaded, f"{self.item.name} has no recipe"
        return self.loaded

    def save(self) -> None:
        """Replace the record on disk, if this item has a file."""
        if self._file:
            write_json(self._file, self.record)

    def run(self) -> GpuRecord:
        """Run the item's function and return the finished record. An exception becomes the outcome `failed`."""
        module, function = self.item.function.split(":")
        try:
            self.record["device"] = provenance.describe(self.device)
            self.save()
            if self.loaded:
                from rlhf.process.torch_setup import set_up_torch

                set_up_torch(self.loaded.recipe)  # attention kernels, seed and memory cap, as in a run
            decision = getattr(importlib.import_module(f"bench.gpu.{module}"), function)(self, **self.item.options)
            record.decide(self.record, decision)
            self.record["outcome"] = "done"
        except Exception as error:
            traceback.print_exc()
            self.record["outcome"] = "failed"
            self.record["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"
        self.record["beside_bytes"] = beside_allocator()
        self.save()
        return self.record


def beside_allocator() -> int | None:
    """Return the bytes in use on the only card beside those that torch's allocator reserves; None if not known."""
    import torch

    used = used_bytes()
    return None if used is None else used - torch.cuda.memory_reserved()


def load(item: GpuItem, dry_run: bool) -> PinnedRecipe | None:
    """Return the recipe of an item; None if it has none. A dry run has a tiny one, which samples in the same way."""
    if item.recipe is None:
        return None
    loaded = recipes.load(ROOT / "recipes" / item.recipe)
    if not dry_run:
        return loaded
    how = {"hardware.trunk": loaded.recipe.hardware.trunk}
    return recipes.load(ROOT / "recipes" / "cpu-tiny" / "v1", TINY | how)


def with_random_weights(loaded: PinnedRecipe, changes: Mapping[str, JsonValue] | None = None) -> PinnedRecipe:
    """Return the recipe with random weights and no downloads."""
    random = random_weights_changes(loaded.recipe, 64, "longest")
    return loaded.with_changes(random | dict(changes or {}))


@click.command()
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True)
def main(name: str, file: Path, dry_run: bool) -> None:
    """Run one item and write its record to FILE. Exit code 1 if it failed."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    (item,) = plan.choose((name,))
    with tempfile.TemporaryDirectory(prefix="rlhf-gpu-") as scratch:
        finished = Context[object](item, dry_run, Path(scratch), file).run()
    raise SystemExit(finished["outcome"] == "failed")


if __name__ == "__main__":
    main()
