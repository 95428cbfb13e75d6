"""TRL: the fused output layer, whose kernels for a card work in place."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from peakmem.device import StandIn

P = ParamSpec("P")
R = TypeVar("R")
HEAD = "trl.kernels.chunked_logprob"


def replacements(stand_in: "StandIn") -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield symbols, and what stands in the place of each: what TRL does on CUDA."""
    if stand_in.stands_for != "cuda":
        return
    # TRL's fused head folds its tiles in Triton kernels that allocate nothing, and in torch elsewhere.
    for name in ("_forward_tile", "_backward_tile"):
        yield f"{HEAD}:{name}", lambda _: lambda *_, **__: None
    yield f"{HEAD}:_addmm_fp32", lambda _: _counted_product(stand_in)
    # Its backward pass makes the logits again; the gradient's product is the one that is counted just above.
    again = f"{HEAD}:ChunkedLogProbFunction.backward"
    yield again, lambda backward: staticmethod(_recomputing(stand_in, backward))
    yield "trl.trainer.utils:_use_triton", lambda _: lambda device: True


def _counted_product(stand_in: "StandIn") -> Callable[[Any, Any, Any], None]:
    return lambda acc, a, b: stand_in.count_flops(2 * a.shape[0] * a.shape[1] * b.shape[1])


def _recomputing(stand_in: "StandIn", function: Callable[P, R]) -> Callable[P, R]:
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        stand_in.recomputing += 1
        try:
            return function(*args, **kwargs)
        finally:
            stand_in.recomputing -= 1

    return call
