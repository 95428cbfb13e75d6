"""Cheaper forward passes for decoding, with the same mathematics as the layers of peft, bitsandbytes and transformers.

A decoding step has one token per row, so that it costs what reading the weights costs, plus a gap for every kernel.
Each context manager here replaces the `forward` of some layers of a model inside its block, and nothing else: the
modules, their parameters and peft's format stay unchanged. Weights are prepared when the block begins and must not
change inside it. There are no gradients.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rlhf.models.forwards import replaced_forwards
from rlhf.models.lean.fused_linear import AdaptedLinear, LowRank, adapted_linear
from rlhf.models.precision import Model, dtype_of
from rlhf.recipe.model_types import RMS_NORMS

Forward = Callable[[Tensor], Tensor]

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # siblings with the same input


@contextmanager
def fused_adapters(model: Model) -> Iterator[None]:
    """Compute LoRA in fewer kernels: one product with all A that read the same input, one in-place product for each B.

    In bfloat16 the sum with the base layer's result is made in float32 and rounded once, where peft rounds B A x, its
    scaled value and the sum. Adapters are cast once; autocast would cast those of a frozen role at each use.
    """
    forwards: dict[nn.Module, Forward] = {}
    for parent in model.modules():
        adapted = {name: found for name, child in parent.named_children() if (found := _active(child))}
        groups = [[adapted.pop(name) for name in names if name in adapted] for names in SAME_INPUT]
        for group in (*filter(None, groups), *([one] for one in adapted.values())):
            forwards |= _lora_forwards(dict(group), dtype_of(model))
    with replaced_forwards(forwards):
        yield


@contextmanager
def fused_norms(model: Model) -> Iterator[None]:
    """Compute RMSNorm in one kernel. In bfloat16 it is rounded once, after the weight; transformers rounds twice."""
    norms: list[Any] = [module for module in model.modules() if type(module).__name__ in RMS_NORMS]
    with replaced_forwards({norm: partial(_normed, norm.weight, norm.variance_epsilon) for norm in norms}):
        yield


def _active(layer: nn.Module) -> tuple[nn.Module, AdaptedLinear] | None:
    """Return a linear layer that has one active adapter, and its parts. All other layers keep peft's forward pass."""
    if not isinstance(layer, LoraLayer) or layer.disable_adapters or not isinstance(layer.get_base_layer(), nn.Linear):
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    return (layer, adapted_linear(layer, active[0])) if len(active) == 1 else None


def _lora_forwards(group: dict[nn.Module, AdaptedLinear], dtype: torch.dtype) -> dict[nn.Module, Forward]:
    """Return forward passes of LoRA layers with the same input, by layer."""
    low_rank = LowRank.of([*group.values()], dtype)
    assert low_rank
    down = _DownProjection(low_rank)
    return {
        layer: partial(_lora_forward, part.layer, down, number, up.t(), low_rank.scaling)
        for number, ((layer, part), up) in enumerate(zip(group.items(), low_rank.ups, strict=True))
    }


def _lora_forward(
    base: nn.Linear, down: "_DownProjection", number: int, up: Tensor, scaling: float, x: Tensor
) -> Tensor:
    """Return W x + scaling * B (A x), of `up` (r, out) and the product with A of the adapter of this number.

    The adapter's part is added in place to the fresh result of the base layer.
    """
    result: Tensor = base(x)
    # a 4-bit layer returns the type of its input; where that is the model's type, these casts do nothing
    low, high = down(x)[number].to(result.dtype), up.to(result.dtype)
    result.view(-1, result.shape[-1]).addmm_(low, high, alpha=scaling)
    return result


class _DownProjection:
    """Product A x of several adapters with the same input, computed at the first call."""

    def __init__(self, low_rank: LowRank):
        self.low_rank = low_rank
        self._input: Callable[[], Tensor | None] = lambda: None  # a weak reference
        self._results: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return A x, (tokens, r), of each adapter.

        The same tensor object counts as the same input, because nothing writes into it between the calls.
        """
        if self._input() is not x:
            down = self.low_rank.down
            self._results = F.linear(x.to(down.dtype), down).flatten(0, -2).split(self.low_rank.ranks, 1)
            self._input = weakref.ref(x)
        return self._results


def _normed(weight: Tensor, eps: float, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):  # under autocast rms_norm would return float32
        return F.rms_norm(x, list(weight.shape), weight, eps)
