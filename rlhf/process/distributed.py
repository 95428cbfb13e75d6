"""Several processes that train one model, one for each device: their ranks and their communication.

All ranks hold the same adapter weights, the same random state and the same full batch; only the work on its rows is
split. Rank 0 alone writes files and prints. Without a launcher there is one rank and the functions that communicate do
nothing. PPO, RLOO and GRPO communicate through these functions only; TRL's trainers use accelerate themselves.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlhf.errors import UserError
from rlhf.files import write_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

T = TypeVar("T")
RowsT = TypeVar("RowsT", bound="Sequence[object] | Tensor")
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # set by every launcher: torchrun, accelerate, Ray Train
LOST = 75  # exit code of a rank that ended because another one did
STARTED_HERE = "RLHF_LAUNCHED"  # set for the ranks that this project starts


class Disagreement(UserError):
    """Ranks differ in recipe, code or data. Every rank raises it."""


# -- ranks ------------------------------------------------------------------------------------------------------------


def launched() -> bool:
    """Return whether a launcher started this process as one of one or more ranks."""
    return all(name in os.environ for name in RANK_VARIABLES)


def rank() -> int:
    """Return the number of this process among all ranks; 0 without a launcher."""
    return _number("RANK") if launched() else 0


def world() -> int:
    """Return the number of ranks; 1 without a launcher."""
    return _number("WORLD_SIZE") if launched() else 1


def local_rank() -> int:
    """Return the index of this process's device on its machine; 0 without a launcher."""
    return _number("LOCAL_RANK") if launched() else 0


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise UserError(f"{name}={os.environ[name]} is no number: unset it, or begin as your launcher says") from None


# -- communication ---------------------------------------------------------------------------------------------------


def own_rows(rows: RowsT) -> RowsT:
    """Return this rank's rows of a sequence, every world-th.

    If the rows are sorted by length, every rank gets about the same work.
    """
    return cast(RowsT, rows[rank() :: world()])  # a slice is of the sequence's own type


def all_sum(*tensors: "Tensor") -> None:
    """Add the tensors of all ranks, in place.

    If each rank has filled only its own rows and left zeros elsewhere, the sum is the whole.
    """
    if world() > 1:
        from torch import distributed

        for tensor in tensors:
            distributed.all_reduce(tensor)


def sum_of(numbers: Mapping[str, float], device: "torch.device | str") -> dict[str, float]:
    """Return the sum over ranks of each number. Every rank gives the same names in the same order."""
    if world() == 1:
        return dict(numbers)
    import torch

    total = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    all_sum(total)
    return dict(zip(numbers, total.tolist(), strict=True))


def reduce_gradients(parameters: "Sequence[nn.Parameter]") -> None:
    """Add the gradients of all ranks in one message; adapters are small."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if world() == 1 or not gradients:
        return
    import torch

    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    all_sum(bucket)
    for gradient, total in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def barrier() -> None:
    """Wait for all ranks."""
    if world() > 1:
        from accelerate import PartialState

        PartialState().wait_for_everyone()


@contextmanager
def main_first() -> Iterator[None]:
    """Let rank 0 run a block before the other ranks, so that they can read what it writes."""
    if rank():
        barrier()
    yield
    if not rank():
        barrier()


def from_main(make: Callable[[], T]) -> T:
    """Return on every rank what `make` returns on rank 0."""
    if world() == 1:
        return make()
    from torch import distributed

    box: list[Any] = [make() if rank() == 0 else None]
    distributed.broadcast_object_list(box)
    value: T = box[0]
    return value


def agree(name: str, value: object) -> None:
    """Raise Disagreement on every rank if the value of any rank is not that of rank 0."""
    if world() == 1:
        return
    from torch import distributed

    from rlhf.recipe.pinned import content_hash  # the command line starts without recipes

    digests = [("", "")] * world()
    distributed.all_gather_object(digests, (socket.gethostname(), content_hash(value)))
    for number, (host, digest) in enumerate(digests):
        if digest != digests[0][1]:
            raise Disagreement(
                f"rank {number} (on {host}) has another {name} than rank 0 (on {digests[0][0]}): {digest[:12]}, not "
                f"{digests[0][1][:12]}; every machine needs the same checkout, command line and files"
            )


# -- endings ---------------------------------------------------------------------------------------------------------


def pass_on(message: str) -> bool:
    """Pass a rank's last message to the process that launched it. Returns whether there is such a process."""
    if STARTED_HERE not in os.environ or not launched():
        return False
    write_json(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), {"message": message, "timestamp": int(time.time())})
    return True


def other_rank_ended(error: BaseException) -> bool:
    """Return whether an error only means that another rank has ended."""
    pattern = r"Connection (closed|reset) by|Broken pipe|remote process exited"
    return world() > 1 and bool(re.search(pattern, str(error)))
