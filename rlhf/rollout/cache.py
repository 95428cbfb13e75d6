"""The key-value cache of the rollout engine: buffers that are allocated once and read through a window."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


def repeated(x: Tensor, copies: int) -> Tensor:
    """Return each row `copies` times, side by side; x itself if that is once."""
    return x if copies == 1 else x.repeat_interleave(copies, 0)


class CacheLayer(CacheLayerMixin):
    """Keys and values of one layer in buffers that are allocated once; a step reads a view of the first `window`.

    Each prompt has `copies` rows in them.
    """

    keys: Tensor  # both from the first update on
    values: Tensor

    def __init__(self, slots: int, copies: int = 1):
        super().__init__()  # type: ignore[no-untyped-call]  # transformers does not annotate it
        self.slots = slots
        self.copies = copies
        self.window = 0
        self.slot: Tensor | None = None  # (1,) where the next token goes; None while the prompts go in

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers, for keys and values of these shapes."""
        self.keys, self.values = self._buffer(key_states), self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, states: Tensor) -> Tensor:
        prompts, heads, _, size = states.shape
        # zeros: a slot that is masked out still enters a product with weight 0, and 0 * NaN is NaN
        return states.new_zeros(prompts * self.copies, heads, self.slots, size)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values. Return those to attend to: the prompts' own, later the window's."""
        if self.slot is None:
            self.lazy_initialization(key_states, value_states)
            self.window = key_states.shape[2]
            self.keys[:, :, : self.window] = repeated(key_states, self.copies)
            self.values[:, :, : self.window] = repeated(value_states, self.copies)
            return key_states, value_states
        self.keys.index_copy_(2, self.slot, key_states)
        self.values.index_copy_(2, self.slot, value_states)
        return self.keys[:, :, : self.window], self.values[:, :, : self.window]

    def keep(self, index: Tensor) -> None:
        """Keep some of the rows."""
        self.keys, self.values = self.keys[index], self.values[index]

    def get_seq_length(self) -> int:
        """Return the slots that are attended to."""
        return self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a mask covers, and the first one's place."""
        return self.window or query_length, 0  # nothing is cached before the prompts go in

    def get_max_length(self) -> int:
        """Return the slots of the buffers."""
        return self.slots
