"""torch's flash attention to sequences of different lengths that lie one after the other, and what it takes.

It needs CUDA, a card of compute capability 8.0 or newer, and 16-bit numbers of heads whose size is a multiple of 8 and
at most 256.
"""

from collections.abc import Callable

import torch

from rlhf.terminal import message_of, say

DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
BOUND = 0.05  # by which a result may differ from float32's: rounding of 16-bit numbers of about 1; other tokens do more
# The operation behind torch.nn.attention.varlen.varlen_attn, whose own arguments differ between releases: the wrapper
# of torch 2.11 has no `seqused_k`. That of 2.13 also fills a tensor in each call that nothing here reads.
flash_attention = torch.ops.aten._flash_attention_forward


def suits(dtype: torch.dtype, size: int) -> bool:
    """Return whether the kernel takes heads of this type and size."""
    return dtype in DTYPES and size % HEAD_MULTIPLE == 0 and size <= LARGEST_HEAD


def works(what: str, difference: Callable[[], float]) -> bool:
    """Return whether a device's kernel does what it should: `difference` tries it and returns the largest error.

    Where it does not, the reason is said after `what`, which happens then.
    """
    try:
        found = difference()
    except (RuntimeError, TypeError, ValueError) as error:
        reason = message_of(error)
    else:
        if found < BOUND:  # NaN is not
            return True
        reason = f"its results differ by {found:.2g}"
    say(f"note: {what}: {reason}")
    return False
