"""Sums of two gradients, which autograd makes in place except under a dispatch mode.

A tensor that is used twice gets two gradients, which autograd's engine adds. Without a mode it adds the second one to
the first in place (accumulate in torch/csrc/autograd/input_buffer.cpp and accumulate_grad.h). A mode counts as a tensor
subclass: for it the engine makes a new tensor, and then releases the first summand.
"""

import sys
from typing import NamedTuple

import torch

from peakmem.events import Event

ADD = torch.ops.aten.add.Tensor


class GradientSum(NamedTuple):
    """A sum that autograd's engine has made, by the numbers of the storages."""

    key: int  # of the sum's storage among those that are alive
    total: int
    first: int  # the first summand's

    def replaces(self, released: int, size: int, newest: Event) -> bool:
        """Return whether the sum takes the place of the storage `released`, given its size and the newest event.

        That is its first summand, of the same size, if it is released right after the sum was made.
        """
        return released == self.first and newest.storage == self.total and newest.bytes == size


def in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def called_by_engine() -> bool:
    """Return whether autograd's engine has called the operation that is dispatched, and no Python code inside a node.

    To be called by `__torch_dispatch__`. The operation's nearest Python caller is then the function that starts the
    backward pass; torch wraps `__torch_dispatch__` in two functions of its own.
    """
    if not in_backward():
        return False
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in ("_fn", "inner"):
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"
