"""A stand-in for a GPU or a CPU that computes nothing and allocates nothing: `meta` tensors, watched by the tracker.

Programs run on it unchanged. Values are tracked where they are known: integers, masks, and everything computed from
them alone are also computed on the CPU, so batches have their real shapes. Values that depend on weights are unknown:
such a number reads as 1 and such a mask as all true, the largest case. Known integers keep their values when something
unknown is written into them: a response stays free of EOS. paths.py has the patches under which torch runs,
and patches/ those of other libraries.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn, Self, cast, get_args

import torch
from torch import Tensor

from peakmem import cards, paths
from peakmem.cards import UNKNOWN, Device, Gpu
from peakmem.events import NotPredicted
from peakmem.kernels import inside
from peakmem.patches import replacing
from peakmem.patches.replacing import Patch
from peakmem.shapes import Shapes
from peakmem.tensors import META, Args, Kwargs, Op, known_numbers, remember, tensors_in
from peakmem.tracker import Tracker

aten = torch.ops.aten
KNOWN = 2**18  # elements of a tensor up to which its values are computed beside
FACTORIES = {"arange", "zeros", "ones", "full", "empty", "eye", "scalar_tensor", "tril_indices"}
RANDOM = {"bernoulli_", "normal_", "uniform_", "random_", "rand_like", "randn_like", "native_dropout", "multinomial"}


class StandIn(Tracker):
    """The tracker of a device that is only stood in for: `cpu`, `cuda`, or a card as `cards.named` takes it.

    `gpu` is what a card of `cuda` is; without it, the one that takes most. Raises ValueError for a card that is none.
    `patches` are the program's own: what it would do otherwise on `meta` than on the device.
    """

    as_cuda = False  # whether the program says `cuda` and is answered as on a card, or says `meta` itself

    def __init__(
        self,
        stands_for: str,
        phases: Collection[str],
        vocab_size: int,
        gpu: Gpu | None = None,
        patches: Callable[["StandIn"], Iterator[Patch]] | None = None,
    ):
        card = None if stands_for in get_args(Device) else cards.named(stands_for)
        self.stands_for: Device = "cpu" if stands_for == "cpu" else "cuda"
        self.gpu = gpu or (card.gpu if card else UNKNOWN)
        super().__init__("meta", phases, vocab_size, inside(self.gpu) if self.stands_for == "cuda" else {})
        self._shapes = Shapes()
        self._patches_of_program = patches
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for part in (paths.patches, replacing.patches, self._patches_of_program):
            for patch in part(self) if part else ():
                self._patches.enter_context(patch)
        super().__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)
        self._patches.close()

    def run(self, func: Op, args: Args, kwargs: Kwargs) -> Any:
        """Execute one operation for its shapes; where all its inputs are known, its values are computed beside."""
        tensors = tensors_in(*args, *kwargs.values()) if kwargs else tensors_in(*args)
        on_device = [x for x in tensors if x.is_meta]
        if on_device and (answer := _ANSWERS.get(id(func))):
            if answer is _read and known_numbers(args[0]) is None:
                return self.unknown(args[0])
            if (guess := _guess(answer, args, kwargs)) is not None:
                self.assume(guess)
            return answer(*args, **kwargs)
        for x in on_device:
            if known_numbers(x) is None:
                return self._shapes(func, args, kwargs)
        out = self._shapes(func, args, kwargs) if on_device else func(*args, **kwargs)
        outputs = tensors_in(out)
        name = func._schema.name.removeprefix("aten::")
        if (
            any(x.is_meta for x in outputs)
            and all(x.numel() <= KNOWN for x in outputs)
            and (all(map(_is_known, tensors)) if tensors else _made_known(name, args, outputs))
            and name not in RANDOM
            and (name != "pow" or self.as_cuda)  # a stage asks for no angle of rotary embeddings, which begin with one
        ):
            args, kwargs = tuple(map(_value, args)), {key: _value(value) for key, value in kwargs.items()}
            if kwargs.get("device") == META:
                kwargs["device"] = torch.device("cpu")
            for tensor, value in zip(outputs, tensors_in(func(*args, **kwargs)), strict=True):
                if tensor.is_meta:
                    remember(tensor, value)
        return out

    def assume(self, what: str) -> None:
        """Note what is taken for true. Nothing is noted here: the largest case is what a rehearsal is for."""

    def note_later(self, what: str) -> None:
        """Note what the program is set to do after the steps. Nothing is noted here."""

    def refuse(self, reason: str) -> NoReturn:
        """Raise NotPredicted: what the program does cannot be followed."""
        raise NotPredicted(reason)

    def unknown(self, x: Tensor) -> Any:
        """Return what `.item()` gives where the number is not known: 1 in the tensor's type."""
        return True if x.dtype == torch.bool else 1.0 if x.is_floating_point() else 1


# -- values --------------------------------------------------------------------------------------------------------


def _is_known(x: Tensor) -> bool:
    """Return whether a tensor's numbers are known: integers and masks from the host are, floats may be weights."""
    if x.is_meta:
        return known_numbers(x) is not None
    return not x.is_floating_point() or not x.dim() or _is_mask(x)


def _is_mask(x: Tensor) -> bool:
    """Return whether a floating tensor of the host has no numbers but 0, 1 and minus infinity, or what stands for it.

    Some are not zero: copies of unknown numbers are zeros.
    """
    if x.requires_grad or not 0 < x.numel() <= KNOWN:
        return False
    return bool(((x == 0) | (x == 1) | (x <= torch.finfo(x.dtype).min)).all()) and bool(x.any())


def _made_known(name: str, args: Args, outputs: list[Tensor]) -> bool:
    """Return whether a factory makes known numbers: integers, or a mask of what stands for minus infinity."""
    if name == "full" and isinstance(args[1], float) and args[1] <= torch.finfo(torch.float16).min:
        return True
    return name in FACTORIES and not _floating(outputs)


def _floating(tensors: list[Tensor]) -> bool:
    return any(x.is_floating_point() for x in tensors)


def _value(x: Any) -> Any:
    """Return the value that is known of an argument on the device; of a list, of each of its entries."""
    if isinstance(x, Tensor):
        return known_numbers(x) if x.is_meta else x
    return type(x)(map(_value, x)) if type(x) in (list, tuple) else x


def _on_device(values: Tensor) -> Tensor:
    x = values.to(META)
    remember(x, values)
    return x


def _read(x: Tensor) -> Any:
    """Return `.item()` of a number that is known."""
    numbers = known_numbers(x)
    assert numbers is not None
    return numbers.item()


def _to_copy(x: Tensor, *, device: Any = None, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    numbers = known_numbers(x)
    if device is None or torch.device(device) == META:
        out: Tensor = aten._to_copy.default(x, device=device, dtype=dtype, **options)
        if numbers is not None:
            remember(out, numbers.to(dtype, copy=True))
        return out
    if numbers is not None:
        return numbers.to(dtype, copy=True)
    return torch.zeros(x.shape, dtype=dtype or x.dtype)


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not target.is_meta:
        numbers = known_numbers(source)
        return target if numbers is None else target.copy_(numbers)
    if _is_known(target) and _is_known(source):
        _value(target).copy_(_value(source))
    return cast(Tensor, aten.copy_.default(target, source))


def _nonzero(x: Tensor) -> Tensor:
    numbers = known_numbers(x)
    return _on_device((torch.ones(x.shape, dtype=torch.bool) if numbers is None else numbers).nonzero())


def _index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Index with masks whose numbers are known; all elements of others count as true, as `meta` cannot count them."""
    out: Tensor = aten.index.Tensor(x, _places(indices))
    if out.numel() <= KNOWN and all(_is_known(i) for i in (x, *indices) if i is not None):
        remember(out, aten.index.Tensor(_value(x), [_value(i) for i in indices]))
    return out


def _index_put_(x: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    out: Tensor = aten.index_put_.default(x, _places(indices), values, accumulate)
    if all(_is_known(i) for i in (x, values, *indices) if i is not None):
        aten.index_put_.default(_value(x), [_value(i) for i in indices], _value(values), accumulate)
    return out


def _places(indices: list[Tensor | None]) -> list[Tensor | None]:
    places: list[Tensor | None] = []
    for i in indices:
        if i is not None and i.dtype == torch.bool:
            values = _value(i) if _is_known(i) else torch.ones(i.shape, dtype=torch.bool)
            places += map(_on_device, values.nonzero().unbind(1))
        else:
            places.append(i)
    return places


def _guess(answer: Callable[..., Any], args: Args, kwargs: Kwargs) -> str | None:
    """Return what an answer takes for true where numbers are not known; None where they are, or do not matter."""
    if answer in (_nonzero, _index, _index_put_):
        masks = [args[0]] if answer is _nonzero else [i for i in args[1] if i is not None and i.dtype == torch.bool]
        return None if all(map(_is_known, masks)) else "a mask that is not known is read as all true"
    if answer is _to_copy:
        device = kwargs.get("device")
        unknown = device is not None and torch.device(device) != META and known_numbers(args[0]) is None
    else:
        unknown = answer is _copy_ and not args[0].is_meta and known_numbers(args[1]) is None
    if unknown:
        return "numbers that are not known are zeros on the host"
    return "two tensors are taken to be equal" if answer is _equal else None


def _equal(a: Tensor, b: Tensor) -> bool:
    return True


_ANSWERS: dict[int, Callable[..., Any]] = {  # by id: torch's operations live for ever, and take long to hash
    id(aten._local_scalar_dense.default): _read,
    id(aten._to_copy.default): _to_copy,
    id(aten.copy_.default): _copy_,
    id(aten.nonzero.default): _nonzero,
    id(aten.index.Tensor): _index,
    id(aten.index_put_.default): _index_put_,
    id(aten.equal.default): _equal,
}
