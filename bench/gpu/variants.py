"""Variants of the same work, each a context manager. A new switch gets a line in DECODING or TRAINING.

A variant is called with the shared base (or with a plain model) and is on inside its `with` block. It raises
VariantUnavailable where the code that is measured has no such switch.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any, TypedDict, TypeVar

import torch

from bench.rounds import in_order
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.recipe.choices import FourBit
from rlhf.rollout import library_decoding, own_tokens
from rlhf.stages.supervised.forward import as_decoder, without_mask

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class VariantUnavailable(Exception):
    """The code has no such switch."""


Variant = Callable[[Any], AbstractContextManager[None]]


def as_it_is(shared: Any) -> AbstractContextManager[None]:
    """Change nothing."""
    return nullcontext()


def setting(module: ModuleType, name: str, value: Any) -> Variant:
    """Return a variant that sets a module's constant to another value."""

    @contextmanager
    def variant(shared: Any) -> Iterator[None]:
        if not hasattr(module, name):
            raise VariantUnavailable(f"{module.__name__} has no {name}")
        original = getattr(module, name)
        setattr(module, name, value)
        try:
            yield
        finally:
            setattr(module, name, original)

    return variant


@contextmanager
def lean_trunk(shared: Any) -> Iterator[None]:
    """Run the lean trunk in place of the decoder's layers, without a mask, as stages do."""
    trunk = LeanTrunk(shared.base)
    with without_mask(trunk.decoder), as_decoder(trunk):
        yield


@contextmanager
def compiled_layers(shared: Any) -> Iterator[None]:
    """Run the library's layers through torch.compile. On a CPU, where only the code is tried, nothing is generated."""
    layers = shared.base.get_decoder().layers
    backend = "inductor" if shared.device.type == "cuda" else "eager"
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # of this object; its class has the usual one


# Attention reads 63 slots beyond the step, on every device, where it reads through a mask.
windows_of_64 = setting(
    library_decoding,
    "WINDOW_BY_DEVICE",
    {device: replace(window, ahead=63) for device, window in library_decoding.WINDOW_BY_DEVICE.items()},
)
# Steps read padded and empty slots too, and leave them out by a mask.
through_a_mask = setting(own_tokens, "BY_DEVICE", dict.fromkeys(own_tokens.BY_DEVICE, False))
# LoRA layers and norms of peft and transformers decode, not the lean ones.
library_layers = setting(
    library_decoding, "FEW_KERNELS_BY_DEVICE", dict.fromkeys(library_decoding.FEW_KERNELS_BY_DEVICE, False)
)


@contextmanager
def lora_casts(shared: Any) -> Iterator[None]:
    """Let peft cast the input of every LoRA layer, which otherwise is left to autocast."""
    layers = [m for m in shared.base.modules() if hasattr(m, "cast_input_dtype_enabled")]
    if not layers:
        raise VariantUnavailable("no layer has cast_input_dtype_enabled")
    original = [layer.cast_input_dtype_enabled for layer in layers]
    for layer in layers:
        layer.cast_input_dtype_enabled = True
    try:
        yield
    finally:
        for layer, value in zip(layers, original, strict=True):
            layer.cast_input_dtype_enabled = value


@contextmanager
def no_adapters(shared: Any) -> Iterator[None]:
    """Run the base alone, which bounds the cost of adapters."""
    shared.roles.activate("base")
    try:
        yield
    finally:
        shared.roles.activate("policy")


@contextmanager
def frozen_role(shared: Any) -> Iterator[None]:
    """Use a frozen adapter instead of a trained one."""
    shared.roles.activate("reference")
    try:
        yield
    finally:
        shared.roles.activate("policy")


def cudnn_attention(on: bool) -> Variant:
    """Return a variant in which torch may, or may not, choose cuDNN's attention."""

    @contextmanager
    def variant(shared: Any) -> Iterator[None]:
        original = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(on)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(original)

    return variant


AS_IT_IS = "as the stages run"
# The first entry is what a run does; the others differ from it in one thing. New switches belong here.
DECODING_VARIANTS: dict[str, Variant] = {
    AS_IT_IS: as_it_is,
    "plain steps": setting(library_decoding, "GRAPHS", False),
    "through a mask": through_a_mask,
    "peft's layers": library_layers,
    "frozen role": frozen_role,
    "no adapters": no_adapters,
}


class SamplingFields(TypedDict, total=False):
    """The fields of `Sampling` that choose how a rollout multiplies."""

    merged: bool
    four_bit: FourBit


SAMPLING: dict[str, SamplingFields] = {"merged weights": {"merged": True}}
SAMPLING_4BIT: dict[str, SamplingFields] = {
    "4-bit products in row groups": {"four_bit": "row_groups"},
    "4-bit weights unpacked": {"four_bit": "unpacked"},
}
LEAN, COMPILED_LAYERS = "lean trunk", "compiled layers"
COMPILED: dict[str, Variant] = {AS_IT_IS: as_it_is, LEAN: lean_trunk, COMPILED_LAYERS: compiled_layers}
TRAINING: dict[str, Variant] = {
    AS_IT_IS: as_it_is,
    LEAN: lean_trunk,
    "LoRA inputs cast": lora_casts,
    "cuDNN attention allowed": cudnn_attention(True),
}


@contextmanager
def in_turn(variant: Variant, shared: Any) -> Iterator[None]:
    """Enter a variant with the device idle before and after, so that no work runs under another's switches."""
    synchronize()
    with variant(shared):
        yield
        synchronize()


def in_rounds(work: Mapping[K, Callable[[int], T]], rounds: int) -> Iterator[tuple[K, list[T] | str]]:
    """Do every piece of work once in each round, so that a drift of the card's clocks falls on all of them.

    Every second round has the reverse order.
    Work is called with the number of its round. After each piece its name and its results so far are yielded; instead
    of the results an error as text, after which this piece is left out.
    """
    results: dict[K, list[T]] = {name: [] for name in work}
    failed = set()
    for number in range(rounds):
        for name, do in in_order(work.items(), number):
            if name in failed:
                continue
            try:
                results[name].append(do(number))
            except Exception as error:  # of one variant: a result, and the others still run
                failed.add(name)
                yield name, f"{type(error).__name__}: {str(error)[:200]}"
            else:
                yield name, results[name]


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
