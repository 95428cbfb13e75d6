"""A stand-in for CUDA graphs on a CPU: the operations of a block, done again on the same tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    it makes, a shape that depends on values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], Any, Any, list[tuple[int, Tensor]]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # by storage: what the block writes into, and a copy
        self._made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = {x.untyped_storage()._cdata: x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        indexing = func.overloadpacket.__name__.startswith("index")
        by_mask = indexing and any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1:2]))
        dynamic = torch.Tag.dynamic_output_shape in func.tags and not indexing
        if func.overloadpacket.__name__ in ASKING or by_mask or dynamic:
            raise AssertionError(f"a graph cannot hold {func}")
        if func._schema.is_mutable:
            made = {x.untyped_storage()._cdata for x in self._made}
            for storage, x in inputs.items():
                if storage not in made and storage not in self._before:
                    whole = x.new_empty(0).set_(x.untyped_storage())
                    self._before[storage] = whole, whole.clone()
        out = func(*args, **kwargs)
        new = [
            (number, x)
            for number, x in enumerate(tree_leaves(out))
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in inputs
        ]
        self._made += [x for _, x in new]
        self.operations.append((func, args, kwargs, new))
        return out

    def __exit__(self, *problem: Any) -> None:
        """Undo what the block did."""
        super().__exit__(*problem)
        for whole, copy in self._before.values():
            whole.copy_(copy)

    def replay(self) -> None:
        """Do the operations, each on the tensors that it had, with new results where they were."""
        for func, args, kwargs, new in self.operations:
            again = tree_leaves(func(*args, **kwargs))
            for number, place in new:
                place.copy_(again[number])


def capture_on_cpu(patch: pytest.MonkeyPatch) -> list[Tape]:
    """Let decoding capture steps on a CPU, as tapes; return those that are made."""
    tapes: list[Tape] = []

    def begin() -> Tape:
        tapes.append(Tape())
        return tapes[-1]

    @contextmanager
    def capturing(tape: Tape) -> Iterator[None]:
        with tape:
            yield

    patch.setitem(decoding.CAPTURES_BY_DEVICE, "cpu", True)
    patch.setattr(torch.cuda, "CUDAGraph", begin)
    patch.setattr(decoding, "capturing", capturing)
    return tapes
