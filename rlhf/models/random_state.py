"""States of all random number generators that training may draw from: saving and restoring."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of torch's, Python's and numpy's generators, as numbers and tensors only."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],  # of this process's device
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state(state["cuda"][0])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the states at the end of the block, which calls code that may draw random numbers or seed generators."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)
