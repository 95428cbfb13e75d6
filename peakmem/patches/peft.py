"""peft: where adapters are put, and which layers are adapters."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from peakmem.tensors import META

if TYPE_CHECKING:
    from peakmem.device import StandIn

LAYERS = "peft.tuners.lora"  # the module with peft's class of LoRA layers


def replacements(stand_in: "StandIn") -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield a symbol, and what is made of it.

    peft leaves a layer's second adapter where it is, the CPU, if the first one is on `meta`.
    """
    if not stand_in.as_cuda:
        yield f"{LAYERS}.layer:LoraLayer._move_adapter_to_device_of_base_layer", lambda _: _move_adapter


def adapter_layers(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the linear layers A and B of all LoRA layers; none where peft is not in use."""
    lora = sys.modules.get(LAYERS)
    if lora is None:
        return set()
    return {
        id(part)
        for module in modules
        if isinstance(module, lora.LoraLayer)
        for side in (module.lora_A, module.lora_B)
        for part in side._modules.values()
    }


def _move_adapter(self: Any, adapter_name: str, device: object = None) -> None:
    weight: Any = self.get_base_layer().weight
    dtype = weight.dtype if weight.is_floating_point() else None
    for layer in (self.lora_A, self.lora_B):
        if adapter_name in layer:
            layer[adapter_name] = layer[adapter_name].to(META, dtype)
