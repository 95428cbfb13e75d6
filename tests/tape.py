"""A stand-in for CUDA graphs on a CPU: the operations of a block, done again on the same tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from rlhf.models.lean import packed, trunk
from rlhf.rollout import decoding
from rlhf.stages.online import captured
from tests import kernels

ASKING = {"_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero", "equal"}


class Tape(TorchDispatchMode):
    """Holds the operations of a block as a graph does: with the Python numbers and the tensors of that moment.

    The block itself changes nothing. Refused is what a graph cannot hold: a number that the host reads, a tensor that
    it makes, a shape that depends on values. What tapes of one pool make may lie in the same memory: a replay first
    overwrites all of it.
    """

    captures: ClassVar["Tape | None"] = None  # that of the block

    def __init__(self) -> None:
        super().__init__()
        self.replays = 0
        self.operations: list[tuple[Callable[..., Any], Any, Any, list[tuple[int, Tensor]]]] = []
        self.outside: dict[int, torch.UntypedStorage] = {}  # what the block finds, to read it or to write into it
        self.sharing = [self]  # tapes of the same pool
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # by storage: what the block writes into, and a copy
        self._made: dict[int, Tensor] = {}  # by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = {x.untyped_storage()._cdata: x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        indexing = func.overloadpacket.__name__.startswith("index")
        by_mask = indexing and any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1:2]))
        dynamic = torch.Tag.dynamic_output_shape in func.tags and not indexing
        if func.overloadpacket.__name__ in ASKING or by_mask or dynamic:
            raise RuntimeError(f"a graph cannot hold {func}")
        for storage in inputs.keys() - self._made.keys():
            x, kept = inputs[storage], inputs[storage].untyped_storage()
            self.outside[storage] = kept
            if func._schema.is_mutable and storage not in self._before:
                whole = x.new_empty(0).set_(kept)
                self._before[storage] = whole, whole.clone()
        out = func(*args, **kwargs)
        new = [
            (number, x)
            for number, x in enumerate(tree_leaves(out))
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in inputs
        ]
        self.add(func, args, kwargs, new)
        return out

    def add(self, func: Callable[..., Any], args: Any, kwargs: Any, new: list[tuple[int, Tensor]]) -> None:
        """Hold an operation whose `new` results lie in no memory of its inputs."""
        self._made |= {x.untyped_storage()._cdata: x for _, x in new}
        self.operations.append((func, args, kwargs, new))

    def __enter__(self) -> Self:
        super().__enter__()
        Tape.captures = self
        return self

    def __exit__(self, *problem: Any) -> None:
        """Undo what the block did."""
        super().__exit__(*problem)
        Tape.captures = None
        for whole, copy in self._before.values():
            whole.copy_(copy)

    @torch.no_grad()
    def replay(self) -> None:
        """Do the operations, each on the tensors that it had, with new results where they were."""
        self.replays += 1
        for made in [x for tape in self.sharing for x in tape._made.values()]:
            made.fill_(torch.nan if made.is_floating_point() else -1)
        for func, args, kwargs, new in self.operations:
            again = tree_leaves(func(*args, **kwargs))
            for number, place in new:
                place.copy_(again[number])

    def pool(self) -> str:
        """Return what names the memory of graphs."""
        return "pool"


def as_kernel(run: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
    """Run a function as one operation, which may do what a graph cannot hold."""
    with _disable_current_modes():
        out = run(*args)
    if Tape.captures is not None:
        Tape.captures.add(run, args, {}, [*enumerate(out)])
    return out


class _Attention(torch.autograd.Function):
    """`kernels.flash_attention` of joined rows as one operation in each direction."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        ctx.save_for_backward(*args[:5])
        ctx.longest = args[5:]
        return as_kernel(_attention, *args)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return *as_kernel(_attention_backward, dy, *ctx.saved_tensors, *ctx.longest), *[None] * 4


def _attention(*args: Any) -> tuple[Tensor, ...]:
    kernel: Any = kernels.flash_attention
    out: tuple[Tensor, ...] = kernel(*args, 0.0, True, False)
    return out[:1]


def _attention_backward(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in args[:3]]
        return torch.autograd.grad(_attention(*inputs, *args[3:]), inputs, dy)


def capture_passes_on_cpu(patch: pytest.MonkeyPatch) -> list[Tape]:
    """Let updates capture passes on a CPU, as tapes, also in float32; return those that are made."""
    kernels.join_rows(patch)
    patch.setattr(packed, "flash_attention", lambda *args: (_Attention.apply(*args[:7]),))
    patch.setitem(trunk.ONEDNN_BY_DEVICE, "cpu", False)
    patch.setitem(captured.CAPTURES_BY_DEVICE, "cpu", True)
    return _tapes(patch, captured, share=True)


def capture_on_cpu(patch: pytest.MonkeyPatch) -> list[Tape]:
    """Let decoding capture steps on a CPU, as tapes; return those that are made."""
    patch.setitem(decoding.CAPTURES_BY_DEVICE, "cpu", True)
    return _tapes(patch, decoding, share=False)


def _tapes(patch: pytest.MonkeyPatch, module: Any, share: bool) -> list[Tape]:
    """Let a module capture tapes, in one pool if they `share`; return those that are made."""
    tapes: list[Tape] = []

    def begin() -> Tape:
        tapes.append(Tape())
        if share:
            tapes[-1].sharing = tapes
        return tapes[-1]

    @contextmanager
    def capturing(tape: Tape, **_: Any) -> Iterator[None]:
        with tape:
            yield

    patch.setattr(torch.cuda, "CUDAGraph", begin)
    patch.setattr(module, "capturing", capturing)
    return tapes
