"""accelerate: the device on which trainers put models and batches."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest import mock

from peakmem.patches.replacing import Patch

if TYPE_CHECKING:
    from peakmem.device import StandIn


def patches(stand_in: "StandIn") -> Iterator[Patch]:
    """Yield a patch by which accelerate finds the stand-in: it looks for accelerators, and knows no other way."""
    yield mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="meta")
