"""transformers: the device of its trainer, and files that leave no trace in a device's memory."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from peakmem.patches.replacing import Patch, replaced
from peakmem.tensors import META

if TYPE_CHECKING:
    from peakmem.device import StandIn


def patches(stand_in: "StandIn") -> Iterator[Patch]:
    """Yield patches for transformers.Trainer on the stand-in."""
    # accelerate finds the trainers' device, and knows no stand-in.
    yield from replaced("transformers:TrainingArguments.device", lambda _: property(_device))
    yield from replaced("transformers:Trainer._save_checkpoint", _left_out)
    yield from replaced("transformers:PreTrainedModel.save_pretrained", _left_out)
    if stand_in.stands_for == "cuda":
        yield from replaced("transformers.training_args:is_torch_bf16_gpu_available", lambda _: lambda *_: True)


def _device(arguments: Any) -> Any:
    return arguments._setup_devices and META


def _left_out(_: object) -> Any:
    return lambda *_, **__: None
