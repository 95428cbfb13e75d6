"""TRL: the fused output layer, whose kernels for a card work in place."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peakmem.device import StandIn

HEAD = "trl.kernels.chunked_logprob"


def replacements(stand_in: "StandIn") -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield symbols, and what stands in the place of each: what TRL does on CUDA."""
    if stand_in.stands_for != "cuda":
        return
    # TRL's fused head folds its tiles in Triton kernels that allocate nothing, and in torch elsewhere.
    for name in ("_forward_tile", "_backward_tile"):
        yield f"{HEAD}:{name}", lambda _: lambda *_, **__: None
    yield f"{HEAD}:_addmm_fp32", lambda _: _counted_product(stand_in)
    yield "trl.trainer.utils:_use_triton", lambda _: lambda device: True


def _counted_product(stand_in: "StandIn") -> Callable[[Any, Any, Any], None]:
    return lambda acc, a, b: stand_in.count_product(2 * a.shape[0] * a.shape[1] * b.shape[1])
