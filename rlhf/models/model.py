"""The type of a model with or without adapters, what it computes in, and the packages that it may need."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from rlhf.errors import UserError

Model = PreTrainedModel | PeftModel


def dtype_of(model: Model) -> torch.dtype:
    """Return the type in which a model multiplies: that of its input embeddings."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.dtype


def computes_in_bfloat16(model: Model) -> bool:
    """Return whether the base is in bfloat16.

    All forward passes then run in `mixed_precision`; adapters are float32.
    """
    return dtype_of(model) == torch.bfloat16


def mixed_precision(model: Model) -> torch.autocast:
    """Return the autocast context in which every forward pass runs.

    A bfloat16 base multiplies its float32 adapters in bfloat16 too, as in training.
    """
    return torch.autocast(model.device.type, torch.bfloat16, enabled=computes_in_bfloat16(model))


def require(package: str, what: str, way_out: str) -> None:
    """Import a package, or raise UserError with the way out.

    Without this check transformers would fail later, or blame another package.
    """
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"{what} needs {package} ({error}): {way_out}") from error


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., object]]) -> Iterator[None]:
    """Give modules another `forward` inside the block."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, usual in before.items():
            del module.forward
            if usual is not None:
                module.forward = usual
