"""The device operations of one decoding step: what a captured graph would hold, read off the stand-in device.

A step of a small batch takes the time of reading the weights, and a gap of a few microseconds for each kernel. This
module counts the kernels and names every operation that a CUDA graph must not hold. The real engine runs
(rlhf/rollout/engine.py), on `meta` tensors.

One operation is at least one kernel. Some are more: a sort, or a 4-bit product whose weight is unpacked first.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from peakmem import StandIn
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.models.shared_base import SharedBase
from rlhf.plan.rehearsal.adapters import write_adapters
from rlhf.plan.rehearsal.device import META, arguments
from rlhf.plan.rehearsal.short_runs import rehearsal_changes
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.names import SharedRole
from rlhf.recipe.schema_online import OnlineOptions, Ppo
from rlhf.recipe.stages import SFT
from rlhf.rollout.engine import ready
from rlhf.run.directory import StageRun
from rlhf.stages.online.session import sampling_settings

LAYERS_OF_A_KIND = 2  # that are rehearsed: layers with adapters are alike, and so are those without
ROLES: tuple[SharedRole, ...] = ("policy", "reference", "base")  # trainable adapter, frozen adapter, no adapter

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}  # these launch no kernel
Op = OpOverload[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

HOST_READ = "reads a value on the host"
OTHER_DEVICE = "copies between devices"
DYNAMIC_SHAPE = "has a shape that depends on values"


@dataclass(frozen=True)
class Operation:
    """An operation that launches at least one kernel, or that a captured graph must not hold."""

    name: str  # as torch calls it: aten::mm
    layer: int | None  # of the decoder; None outside its layers
    unsafe: str | None = None  # why a captured graph must not hold it


@dataclass(frozen=True)
class DecodingStep:
    """The operations of one decoding step, in order."""

    operations: tuple[Operation, ...]
    adapted: tuple[int, ...] | None = None  # numbers of the layers that have adapters; None: all

    @property
    def per_layer(self) -> tuple[str, ...]:
        """Return the operations of a decoder layer that has adapters. Raises ValueError if such layers differ."""
        return self._of_layers(self._layers if self.adapted is None else self._layers & {*self.adapted})

    @property
    def per_plain_layer(self) -> tuple[str, ...] | None:
        """Return the operations of a layer without adapters; None if all have them. Raises as `per_layer`."""
        return None if self.adapted is None else self._of_layers(self._layers - {*self.adapted})

    @property
    def _layers(self) -> set[int]:
        return {op.layer for op in self.operations if op.layer is not None}

    def _of_layers(self, layers: set[int]) -> tuple[str, ...]:
        names = {tuple(op.name for op in self.operations if op.layer == layer) for layer in layers}
        if len(names) != 1:
            raise ValueError(
                f"{len(layers)} decoder layers of one kind have {len(names)} different lists of operations"
            )
        return names.pop()

    @property
    def outside(self) -> tuple[str, ...]:
        """Return the operations outside the decoder layers: embedding, mask, rotation, output layer, draw."""
        return tuple(op.name for op in self.operations if op.layer is None)

    @property
    def unsafe(self) -> tuple[Operation, ...]:
        """Return the operations that a captured graph must not hold."""
        return tuple(op for op in self.operations if op.unsafe)


def decoding_steps(loaded: PinnedRecipe, layers: int | None = None) -> dict[str, DecodingStep]:
    """Return one step of a rollout for each of `ROLES`, on a model of the recipe's shape with `layers` layers.

    Without `layers` there are LAYERS_OF_A_KIND with adapters, and as many without if not all have them. The rollout is
    that of the recipe's `rollout_stage`, which there must be.
    """
    layers = layers or LAYERS_OF_A_KIND
    changed = loaded.with_changes(rehearsal_changes(loaded.recipe, layers))
    stage, options = next(iter(changed.recipe.online().items()))
    with tempfile.TemporaryDirectory(prefix="rlhf-plan-") as folder:
        run = StageRun(Path(folder), changed, stage)
        recorder = _Recorder(**arguments(changed.recipe))
        with recorder:
            shared = rehearsed_roles(run, options, lean=changed.recipe.hardware.trunk == "lean")
            tokenizer = load_tokenizer(run.base)
            return {role: DecodingStep(step(recorder, shared, role, tokenizer, options)) for role in ROLES}


def step(
    recorder: "_Recorder", shared: SharedBase, role: SharedRole, tokenizer: DialogueTokenizer, options: OnlineOptions
) -> tuple[Operation, ...]:
    """Return the operations of the second decoding step of a rollout of `role`.

    The first one sets up what later ones find ready.
    """
    settings = sampling_settings(options)
    lengths = [settings.max_prompt_length] * settings.batch_size
    lengths[0] = max(1, settings.max_prompt_length // 2)  # a padded row, so that there is a mask
    prompts = [[tokenizer.eos_id] * length for length in lengths]
    uniforms = torch.empty(settings.batch_size, settings.response_length, device=META)
    shared.base.eval()
    with torch.no_grad(), shared.role(role), ready(shared.base, shared.role_trunk) as new_decoding:
        decoding = new_decoding(prompts, uniforms, settings, tokenizer)
        decoding.open_window(1)
        decoding.advance()
        with recorder.recording(shared.base.get_decoder()) as operations:
            decoding.advance()
    return tuple(operations)


def rehearsed_roles(run: StageRun, options: OnlineOptions, lean: bool = False) -> SharedBase:
    """Return the roles that sample, over one base on the stand-in device, from new adapters; with any head on them."""
    policy = run.run_directory / SFT
    write_adapters(run, (SFT,))  # also for a recipe without SFT, whose reference alone has no adapter
    reference = None if run.loaded.recipe.start == "base" else policy
    shared = SharedBase(load_base(run.base, META), {"policy": policy, "reference": reference}, ("policy",), lean)
    if isinstance(options, Ppo) and options.value_model == "head":
        shared.add_value_head()
    return shared


class _Recorder(StandIn):
    """The stand-in device, writing down the operations of a block."""

    _layer: int | None = None
    _operations_of_block: list[Operation] | None = None

    @contextmanager
    def recording(self, decoder: nn.Module) -> Iterator[list[Operation]]:
        """Record the operations inside the block, each with the decoder layer that launched it."""
        operations: list[Operation] = []
        hooks = []
        for index, layer in enumerate(decoder.layers):  # type: ignore[arg-type]  # a ModuleList; torch's stubs say Tensor or Module
            hooks.append(layer.register_forward_pre_hook(lambda *_, index=index: self._enter(index)))
            hooks.append(layer.register_forward_hook(lambda *_: self._enter(None)))
        self._operations_of_block = operations
        try:
            with mock.patch.object(LeanTrunk, "_layer", self._noted(LeanTrunk._layer)):  # it does not call the layers
                yield operations
        finally:
            self._operations_of_block = None
            for hook in hooks:
                hook.remove()

    def run(self, func: Op, args: Args, kwargs: Kwargs) -> Any:
        """Execute one operation, and write it down inside `recording`."""
        inputs = _tensors((args, kwargs))
        before = {id(x.untyped_storage()) for x in inputs}
        out = super().run(func, args, kwargs)
        if self._operations_of_block is not None:
            unsafe = _unsafe(func, args, kwargs, inputs)
            if unsafe or _launches(func, before, _tensors(out)):
                self._operations_of_block.append(Operation(func._schema.name, self._layer, unsafe))
        return out

    def _noted(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a function that computes a layer of the lean trunk, with a note of its number."""

        def layer(trunk: LeanTrunk, number: int, *arguments: object) -> Tensor:
            self._enter(number)
            out = compute(trunk, number, *arguments)
            self._enter(None)
            return out

        return layer

    def _enter(self, layer: int | None) -> None:
        self._layer = layer


def _tensors(values: object) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _launches(func: Op, before: set[int], outputs: list[Tensor]) -> bool:
    """Return whether an operation works on the device: it writes into a tensor there, or makes a new one."""
    if not any(x.device == META for x in outputs) or func._schema.name.removeprefix("aten::") in ALLOCATIONS:
        return False
    return func._schema.is_mutable or any(id(x.untyped_storage()) not in before for x in outputs)


def _unsafe(func: Op, args: Args, kwargs: Kwargs, inputs: list[Tensor]) -> str | None:
    """Return why a captured graph must not hold an operation, None if it may."""
    if not any(x.device == META for x in inputs) and kwargs.get("device") != META:
        return None
    if torch.Tag.data_dependent_output in func.tags:
        return HOST_READ
    if _picks_by_mask(func, args) or (torch.Tag.dynamic_output_shape in func.tags and not _indexing(func)):
        return DYNAMIC_SHAPE
    device = kwargs.get("device")
    devices = {x.device for x in inputs if x.dim() or func._overloadpacket is torch.ops.aten._to_copy}
    devices |= {torch.device(device)} if device is not None else set()
    return OTHER_DEVICE if len(devices) > 1 else None


def _indexing(func: Op) -> bool:
    return func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


def _picks_by_mask(func: Op, args: Args) -> bool:
    """Return whether an index is a mask: the device must then count its elements before the kernel is launched."""
    return _indexing(func) and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
