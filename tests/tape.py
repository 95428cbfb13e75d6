"""A stand-in for CUDA graphs on a CPU: the operations of a block, done again on the same tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.rollout import decoding

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
        for made in self._made.values():
            made.fill_(torch.nan if made.is_floating_point() else -1)
        for func, args, kwargs, new in self.operations:
            again = tree_leaves(func(*args, **kwargs))
            for number, place in new:
                place.copy_(again[number])

    def pool(self) -> str:
        """Return what names the memory of graphs."""
        return "pool"


def capture_on_cpu(patch: pytest.MonkeyPatch) -> list[Tape]:
    """Let decoding capture steps on a CPU, as tapes; return those that are made."""
    patch.setitem(decoding.CAPTURES_BY_DEVICE, "cpu", True)
    return _tapes(patch, decoding)


def _tapes(patch: pytest.MonkeyPatch, module: Any) -> list[Tape]:
    """Let a module capture tapes; return those that are made."""
    tapes: list[Tape] = []

    def begin() -> Tape:
        tapes.append(Tape())
        return tapes[-1]

    @contextmanager
    def capturing(tape: Tape, **_: Any) -> Iterator[None]:
        with tape:
            yield

    patch.setattr(torch.cuda, "CUDAGraph", begin)
    patch.setattr(module, "capturing", capturing)
    return tapes
