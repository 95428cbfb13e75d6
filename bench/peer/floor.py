"""`python -m bench.peer.floor STAGE-ARGUMENTS`: how many floating-point operations each phase of a step needs.

Runs the real stage, any that trains, under torch's FLOP counter, with attention written as products so that it counts,
and measures how many such operations a second the device reaches in one large product. Their quotient estimates the
least time of the same arithmetic on this device; a product of another size may reach a higher rate. Prints one JSON
line. For two steps of SFT: `cpu float32 2 run sft --recipe DIR --set sft.max_steps=2 sft.eval_steps=null`.
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.clocks import timer_of
from rlhf import cli
from rlhf.models import matmul
from rlhf.observe.telemetry import Telemetry
from rlhf.rollout import decoding

STEP_PHASES = ("rollout", "score", "update", "train")  # the last is the whole step of SFT, reward model, DPO and KTO


def count(arguments: list[str], steps: int) -> dict[str, float]:
    """Return the operations of each phase, per step, over a run of `steps`."""
    flops: dict[str, int] = defaultdict(int)
    timed = Telemetry.phase

    @contextmanager
    def counted(self: Telemetry, name: str) -> Iterator[None]:
        with timed(self, name), FlopCounterMode(display=False) as counter:
            yield
        flops[name] += counter.get_total_flops()

    Telemetry.phase = counted  # type: ignore[method-assign]
    decoding.CAPTURES_BY_DEVICE["cuda"] = False  # the counter does not see what a replayed graph does
    matmul.ONEDNN = False  # nor oneDNN's products: the same ones by torch are counted
    with sdpa_kernel(SDPBackend.MATH):  # fused attention on a CPU has no formula; as products it is counted
        cli.cli(arguments, standalone_mode=False)
    return {name: flops[name] / steps for name in STEP_PHASES if name in flops}


def rate(device: str, dtype: torch.dtype, size: int) -> float:
    """Return the operations a second of a size x size product, by the faster library: the median of five."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return max(_rate(device, partial(multiply, a, b), size) for multiply in (torch.mm, matmul.matmul))


def _rate(device: str, multiply: Callable[[], torch.Tensor], size: int) -> float:
    now, seconds = timer_of(device), []
    for _ in range(6):
        start = now()
        multiply().sum().item()
        seconds.append(now() - start)
    return 2 * size**3 / statistics.median(seconds[1:])


def main() -> None:
    """Print the rate and the operations as one JSON line."""
    device, dtype, steps, *arguments = sys.argv[1:]
    if device == "cpu":
        torch.set_num_threads(1)
    speed = rate(device, getattr(torch, dtype), 2048 if device == "cpu" else 8192)
    print(json.dumps({"flops_per_second": speed, "flops_per_step": count(arguments, int(steps))}))


if __name__ == "__main__":
    main()
