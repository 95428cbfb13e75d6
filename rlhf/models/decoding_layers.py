"""Cheaper forward passes for decoding, with the same mathematics as the layers of peft, bitsandbytes and transformers.

A decoding step has one token per row, so that it costs what reading the weights costs, plus a gap for every kernel.
Each context manager here replaces the `forward` of some layers of a model inside its block, and nothing else: the
modules, their parameters and peft's format stay unchanged. Weights are prepared when the block begins and must not
change inside it. There are no gradients.

- `fused_adapters`, `fused_norms`: LoRA and RMSNorm in fewer kernels.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rlhf.models.forwards import replaced_forwards
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
    with replaced_forwards(_lora_forwards(model)):
        yield


@contextmanager
def fused_norms(model: Model) -> Iterator[None]:
    """Compute RMSNorm in one kernel. In bfloat16 it is rounded once, after the weight; transformers rounds twice."""
    norms: list[Any] = [module for module in model.modules() if type(module).__name__ in RMS_NORMS]
    with replaced_forwards({norm: _norm_forward(norm.weight, norm.variance_epsilon) for norm in norms}):
        yield


# -- adapters ------------------------------------------------------------------------------------------------------


class _Adapter(NamedTuple):
    """A linear layer with one active adapter: W x + scaling * B (A x)."""

    base: nn.Linear
    a: Tensor  # (r, in)
    b: Tensor  # (out, r)
    scaling: float


def _lora_forwards(model: Model) -> dict[nn.Module, Forward]:
    """Return lean forward passes of the LoRA layers; siblings with the same input share a product."""
    dtype = dtype_of(model)
    adapters = _plain_adapters(model)
    groups: list[list[nn.Module]] = []
    for parent in model.modules():
        children = {name: child for name, child in parent.named_children() if child in adapters}
        for names in SAME_INPUT:
            groups.append([children.pop(name) for name in names if name in children])
        groups += [[child] for child in children.values()]
    forwards: dict[nn.Module, Forward] = {}
    for group in filter(None, groups):
        forwards |= _lora_group({layer: adapters[layer] for layer in group}, dtype)
    return forwards


def _lora_group(group: dict[nn.Module, _Adapter], dtype: torch.dtype) -> dict[nn.Module, Forward]:
    """Return forward passes of LoRA layers with the same input, by layer; `group` holds the adapter of each."""
    down = _DownProjection([adapter.a.to(dtype) for adapter in group.values()])
    forwards: dict[nn.Module, Forward] = {}
    start = 0
    for layer, adapter in group.items():
        up = adapter.b.to(dtype).t()  # (r, out)
        part = slice(start, start + len(up))
        start = part.stop
        forwards[layer] = _lora_forward(adapter.base, down, part, up, adapter.scaling)
    return forwards


def _lora_forward(base: nn.Linear, down: "_DownProjection", part: slice, up: Tensor, scaling: float) -> Forward:
    """Return the forward pass W x + scaling * B (A x).

    The adapter's part is added in place to the fresh result of the base layer.
    """

    def forward(x: Tensor) -> Tensor:
        result: Tensor = base(x)
        # a 4-bit layer returns the type of its input; where that is the model's type, these casts do nothing
        low, high = down(x)[:, part].to(result.dtype), up.to(result.dtype)
        result.view(-1, result.shape[-1]).addmm_(low, high, alpha=scaling)
        return result

    return forward


class _DownProjection:
    """Product A x of several adapters with the same input, computed at the first call."""

    def __init__(self, weights: list[Tensor]):
        self.weight = torch.cat(weights) if len(weights) > 1 else weights[0]  # (sum of r, in)
        self._input: weakref.ref[Tensor] | None = None
        self._result: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return A x, (tokens, sum of r).

        The same tensor object counts as the same input, because nothing writes into it between the calls.
        """
        if self._result is None or self._input is None or self._input() is not x:
            self._result = F.linear(x.to(self.weight.dtype), self.weight).flatten(0, -2)
            self._input = weakref.ref(x)
        return self._result


def _plain_adapters(model: Model) -> dict[nn.Module, _Adapter]:
    """Return the LoRA layers that add scaling * B A x of one active adapter, with its parts.

    All other layers keep peft's forward pass.
    """
    adapters: dict[nn.Module, _Adapter] = {}
    for layer in model.modules():
        if not isinstance(layer, LoraLayer) or layer.disable_adapters or layer.merged:
            continue
        active = [name for name in layer.active_adapters if name in layer.lora_A]
        base = layer.get_base_layer()
        if not isinstance(base, nn.Linear) or len(active) != 1:
            continue
        (name,) = active
        if name not in layer.lora_variant and not layer.lora_bias[name]:
            a, b = layer.lora_A[name], layer.lora_B[name]
            assert isinstance(a, nn.Linear) and isinstance(b, nn.Linear)
            adapters[layer] = _Adapter(base, a.weight, b.weight, layer.scaling[name])
    return adapters


# -- norms ---------------------------------------------------------------------------------------------------------


def _norm_forward(weight: Tensor, eps: float) -> Forward:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # under autocast rms_norm would return float32
            return F.rms_norm(x, list(weight.shape), weight, eps)

    return forward
