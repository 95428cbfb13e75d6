"""Labels storages by what holds them: weights and buffers of modules, their gradients, states of optimizers."""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from peakmem.events import Component
from peakmem.patches import bitsandbytes, peft
from peakmem.tensors import tensors_in

Label = Callable[[Tensor | None, Component], None]  # gives a tensor's storage a component


class Holders:
    """The modules and optimizers that are made between `watch` and `stop`."""

    def __init__(self) -> None:
        self._modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._optimizers: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = weakref.WeakValueDictionary()
        self._undo = ExitStack()

    def watch(self) -> None:
        """Note every module and optimizer that is made from now on."""
        self._undo.enter_context(_noting_instances(nn.Module, self._modules))
        self._undo.enter_context(_noting_instances(torch.optim.Optimizer, self._optimizers))

    def stop(self) -> None:
        """Leave classes and parameters as they were before `watch`."""
        for module in self._all_modules():
            for parameter in module._parameters.values():
                if hasattr(parameter, "_watched"):
                    delattr(parameter, "_watched")
        self._undo.close()

    def label_tensors(self, label: Label) -> None:
        """Label all that is held now, and from now on each gradient as soon as it is made."""
        modules = self._all_modules()
        adapters = peft.adapter_layers(modules)
        for module in modules:
            head = isinstance(module, nn.Linear) and module.out_features == 1
            component: Component = "adapters" if id(module) in adapters else "heads" if head else "base"
            for parameter in module._parameters.values():  # torch's own walks take many times as long
                if parameter is not None:
                    self._label_parameter(parameter, component, label)
            for buffer in module._buffers.values():
                label(buffer, "base")
        for optimizer in list(self._optimizers.values()):
            for state in optimizer.state.values():
                for value in tensors_in(*state.values()):
                    label(value, "optimizer")

    @property
    def optimizers(self) -> int:
        """Return how many optimizers there are."""
        return len(self._optimizers)

    def _all_modules(self) -> list[nn.Module]:
        """Return the modules that were constructed, and copies inside them, whose constructors did not run."""
        modules: dict[int, nn.Module] = {}
        waiting = list(self._modules.values())
        while waiting:
            module = waiting.pop()
            if id(module) not in modules:
                modules[id(module)] = module
                waiting += filter(None, module._modules.values())
        return list(modules.values())

    def _label_parameter(self, parameter: nn.Parameter, component: Component, label: Label) -> None:
        label(parameter, component)
        for tensor in bitsandbytes.scales(parameter):
            label(tensor, "quantization")
        label(parameter.grad, "gradients")
        if parameter.requires_grad and not hasattr(parameter, "_watched"):
            parameter._watched = True  # type: ignore[attr-defined]  # an attribute of this module
            hook = parameter.register_post_accumulate_grad_hook(lambda p: label(p.grad, "gradients"))
            self._undo.callback(hook.remove)


@contextmanager
def _noting_instances(kind: Any, instances: weakref.WeakValueDictionary[int, Any]) -> Iterator[None]:
    """Add every new instance of a class to `instances` inside the block, by its id: a class may hash by its content."""
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: object, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        instances[id(self)] = self

    kind.__init__ = __init__
    try:
        yield
    finally:
        kind.__init__ = original
