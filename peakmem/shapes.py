"""Results of operations on `meta` tensors, remembered by the shapes of their inputs.

torch works out many shapes in Python, an operation at a time, which takes most of a rehearsal; every layer asks the
same again. Remembered are operations whose results are new tensors without gaps, and those that write into their first
argument and return it with its shape. Views and whatever else shares memory with an input are left to torch.
"""

from typing import Any

import torch
from torch import Tensor

from peakmem.tensors import PLAIN, Args, Kwargs, Op, tensors_in

Key = tuple[object, ...]
OutputShape = tuple[torch.Size, tuple[int, ...], torch.dtype]  # shape, stride and type of a tensor
FIRST = "first"  # in place of results: the operation returns its first argument
NOT_REMEMBERED = "not remembered"


class Shapes:
    """Call it in place of an operation with at least one `meta` tensor."""

    def __init__(self) -> None:
        self._known: dict[Key, Any] = {}

    def __call__(self, func: Op, args: Args, kwargs: Kwargs) -> Any:
        """Return what `func(*args, **kwargs)` would: its results if they are remembered, else it is run."""
        try:
            key: Key = (id(func), *map(_key, args))
            if kwargs:
                key += tuple((name, _key(value)) for name, value in kwargs.items())
            layout = self._known.get(key)
        except TypeError:  # an argument that cannot be a key
            return func(*args, **kwargs)
        if layout is None:
            out = func(*args, **kwargs)
            self._known[key] = _remembered(func, args, kwargs, out)
            return out
        if layout is NOT_REMEMBERED:
            return func(*args, **kwargs)
        if layout is FIRST:
            return args[0]
        kind, layouts = layout
        if kind is Tensor:
            shape, stride, dtype = layouts[0]
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        tensors = [None if m is None else torch.empty_strided(m[0], m[1], dtype=m[2], device="meta") for m in layouts]
        return kind(tensors)


def _key(value: object) -> object:
    kind = type(value)
    if kind in PLAIN:
        return kind, value  # 1, 1.0 and True are equal, and their results may differ
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return kind, value


def _remembered(func: Op, args: Args, kwargs: Kwargs, out: object) -> object:
    """Return how to make the results again, or NOT_REMEMBERED."""
    if out is None:
        return NOT_REMEMBERED
    if args and out is args[0]:
        return NOT_REMEMBERED if torch.Tag.inplace_view in func.tags else FIRST
    if func._schema.is_mutable:
        return NOT_REMEMBERED
    kind, results = (type(out), list(out)) if isinstance(out, list | tuple) else (Tensor, [out])
    taken = {id(x.untyped_storage()) for x in tensors_in(*args, *kwargs.values())}
    outputs: list[OutputShape | None] = []
    for result in results:
        if result is None:
            outputs.append(None)
            continue
        if not isinstance(result, Tensor) or type(result) is not Tensor or not result.is_meta:
            return NOT_REMEMBERED
        storage = result.untyped_storage()
        if id(storage) in taken or result.storage_offset() or storage.nbytes() != _bytes(result):
            return NOT_REMEMBERED
        taken.add(id(storage))
        outputs.append((result.shape, result.stride(), result.dtype))
    return kind, outputs


def _bytes(x: Tensor) -> int:
    """Return what a new tensor with this shape and stride takes."""
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() if x.numel() else 0
