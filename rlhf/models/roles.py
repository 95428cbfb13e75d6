"""Adapters on one base, one for each role, and which of them is active.

A role is made active before a forward pass and stays so until its backward pass: with gradient checkpointing the
recomputation uses whatever adapter is active then.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.models.adapters import adapter_config, adapter_weights, attach
from rlhf.models.precision import computes_in_bfloat16
from rlhf.recipe.stages import Role

AdapterStart = Path | LoraConfig | None  # of a role: an adapter's folder; a new adapter; none, the base itself


class Roles:
    """Roles on `base`, by where each starts; the role `base`, and any that starts with None, has no adapter.

    Only `trainable` roles get gradients. `peft` is the library's model of the base with all adapters; `active` is the
    role that a forward pass uses, None outside any block.
    """

    peft: PeftModel

    def __init__(self, base: PreTrainedModel, starts: Mapping[Role, AdapterStart], trainable: tuple[Role, ...] = ()):
        self.base = base
        self.trainable: set[Role] = set(trainable)
        self.active: Role | None = None
        self._layers: list[LoraLayer] = []
        self._bare: set[Role] = {"base", *(role for role, start in starts.items() if start is None)}
        for role, start in starts.items():
            if start is not None:
                self.add(role, start, adapter_weights(start) if isinstance(start, Path) else None)
        self._prepare()

    def add(
        self,
        role: Role,
        start: Path | LoraConfig,
        weights: Mapping[str, Tensor] | None = None,
        trainable: bool = False,
    ) -> None:
        """Add a role whose adapter is like the one in a folder, be it a classifier's, or has a configuration.

        Its LoRA `weights` are given, or new.
        """
        config = start
        if isinstance(config, Path):
            config = adapter_config(config)
            config.task_type, config.modules_to_save, config.inference_mode = "CAUSAL_LM", None, False
        if trainable:
            self.trainable.add(role)
        self.peft = attach(getattr(self, "peft", self.base), role, config, weights)
        self._prepare()

    def parameters(self, role: Role) -> list[nn.Parameter]:
        """Return the adapter weights of one role, in a fixed order."""
        return [p for name, p in self.peft.named_parameters() if _role_of(name) == role]

    def activate(self, role: Role) -> None:
        """Make a role's adapter the active one; a role without an adapter switches all of them off.

        This sets two attributes of each LoRA layer and no more: an update switches roles in each minibatch, and
        peft's own `set_adapter` also walks all modules and parameters. It never changes which parameters have
        gradients.
        Raises ValueError when there is no such role.
        """
        if role == self.active:
            return
        bare = role in self._bare
        if not bare and role not in self.peft.peft_config:
            raise ValueError(f"no role {role}")
        adapters: list[str] = [role]
        for layer in self._layers:
            layer._disable_adapters = bare
            if not bare:
                layer._active_adapter = adapters
        if not bare:
            tuner: Any = self.peft.base_model
            self.peft.active_adapter = tuner.active_adapter = role
        self.active = role

    @contextmanager
    def using(self, role: Role) -> Iterator[None]:
        """Make a role the active one inside a block; after it, the one that was active before, or none."""
        before = self.active
        self.activate(role)
        try:
            yield
        finally:
            if before is None:
                self.active = None  # a pass outside of every block is refused
            else:
                self.activate(before)

    def guard_backward(self, states: Tensor, role: Role) -> None:
        """Let the backward pass of a role's hidden states raise RuntimeError when another role is active by then.

        The check runs before any layer is recomputed.
        """

        def check(gradient: Tensor) -> None:
            if self.active != role:
                raise RuntimeError(f"backward pass of {role} while {self.active} is active: activate {role} first")

        if states.requires_grad:
            states.register_hook(check)

    def _prepare(self) -> None:
        """Apply the settings that all active roles share. peft undoes some of them when it adds an adapter."""
        model: Any = getattr(self, "peft", self.base)
        self._layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        half = computes_in_bfloat16(self.base)
        for layer in self._layers:
            for weights in (layer.lora_A, layer.lora_B):
                for role, linear in weights.items():
                    linear.requires_grad_(role in self.trainable)
                    if half and role not in self.trainable:
                        linear.to(torch.bfloat16)  # as autocast would round them in each forward pass
        self.active = None
        model.eval()  # but for the time of an update, which may need train mode for checkpointing
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # it would make the ratio of new to old probabilities noise from the first update on


def _role_of(name: str) -> str | None:
    """Return the role that a parameter belongs to: `x.lora_A.policy.weight` to `policy`; None for all others."""
    parts = name.split(".")
    matrix = next((i for i, part in enumerate(parts) if part.startswith("lora_")), None)
    return None if matrix is None else parts[matrix + 1]
