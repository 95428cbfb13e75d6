"""Decoding with the layers of transformers: a cache that is allocated once and read through a window."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from rlhf.data.tokenize import SpecialIds, pad_right
from rlhf.models import decoding_layers
from rlhf.models.precision import Model, dtype_of
from rlhf.models.traits import sliding_window
from rlhf.rollout.decoding import Decoding, Sampling, repeated

FEW_KERNELS_BY_DEVICE = {"cpu": False, "cuda": True}  # same mathematics in fewer kernels, whose rounding may differ


@dataclass(frozen=True)
class Window:
    """Number of cached slots that attention reads: those up to the step and `ahead` more, rounded up to `multiple`.

    A wide window reads slots that are still empty; a narrow one must be widened more often, on CUDA with a capture each
    time. A response of R tokens with windows of W steps reads R * W / 2 empty slots in each row and captures R / W
    times. If a slot of all rows has b bytes and a capture costs as much as reading c bytes, the sum is least at
    W = sqrt(2 c / b). With c as estimated above that is 195 steps for 20 rows of Llama-2-7B (b = 20 * 524,288) and
    437 for 16 rows of Mistral-7B (b = 16 * 131,072); 256 steps cost 4 % and 15 % more than the least of each.
    """

    ahead: int
    multiple: int
    whole: int  # the size of the whole cache is rounded up to a multiple of this


# On a CPU nothing is captured. On CUDA the memory-efficient attention kernel uses a mask directly if its rows are a
# multiple of 16 long, and pads a copy of it in every layer otherwise.
WINDOW_BY_DEVICE = {"cpu": Window(0, 64, 1), "cuda": Window(255, 16, 16)}


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


class LibraryDecoding(Decoding):  # rlhf/plan/rehearsal/seams.py replaces __init__ in a rehearsal
    """Decoding with a model that transformers runs, and a cache that is read through a window."""

    def __init__(
        self,
        model: Model,
        prompts: Sequence[list[int]],
        uniforms: Tensor,
        sampling: Sampling,
        tokenizer: SpecialIds,
    ):
        super().__init__(model, uniforms, sampling, tokenizer)
        self.decoder = model.get_decoder()
        self.copies = len(uniforms) // len(prompts)
        device = uniforms.device
        ids = pad_right([p[::-1] for p in prompts], tokenizer.pad_id).flip(1).to(device)  # prompts end together
        self.width = ids.shape[1]
        window = sliding_window(model.config)
        self.sliding = window if window and self.width + self.room > window else None
        self.kinds = sorted(set(getattr(model.config, "layer_types", None) or ()))
        self.window_rule = WINDOW_BY_DEVICE[device.type]
        slots = round_up(self.width + self.room, self.window_rule.whole)
        self.dtype = dtype_of(model)
        self.layers = [CacheLayer(slots, self.copies) for _ in range(model.config.num_hidden_layers)]
        self.cache = Cache(layers=[*self.layers])
        lengths = torch.tensor([len(p) for p in prompts for _ in range(self.copies)], device=device)
        self.real = torch.arange(slots, device=device) >= self.width - lengths[:, None]
        self.position = lengths[:, None] - 1  # of the newest token
        self._prefill(ids)

    def open_window(self, step: int) -> bool:
        """As `Decoding.open_window`: widen the window of attention if `step` needs it."""
        needed = self.width + step
        if needed <= self.layers[0].window:
            return False
        for layer in self.layers:
            opened = round_up(needed + self.window_rule.ahead, self.window_rule.multiple)
            layer.window = min(opened, layer.slots)
        return True

    def alike(self, step: int) -> int:
        """As `Decoding.alike`: up to the end of the window."""
        return min(super().alike(step), self.layers[0].window - self.width - step)

    def drop_ended(self) -> None:
        """As `Decoding.drop_ended`: all of them."""
        index = (~self.rows.ended).nonzero().squeeze(1)
        self.keep(index)
        self.real, self.position = self.real[index], self.position[index]
        for layer in self.layers:
            layer.keep(index)

    def _prefill(self, ids: Tensor) -> None:
        real = self.real[:: self.copies, : self.width]
        mask = None
        if not real.all():
            causal = torch.ones(self.width, self.width, dtype=torch.bool, device=ids.device).tril()
            own = torch.eye(self.width, dtype=torch.bool, device=ids.device)  # a softmax over nothing would be NaN
            mask = (causal & (real[:, None, :] | own))[:, None]
        elif self.sliding:
            mask = torch.ones(1, 1, self.width, self.width, dtype=torch.bool, device=ids.device).tril()
        positions = (real.cumsum(1) - 1).clamp(min=0)
        masks = None if mask is None else self._masks(mask, None)
        self._draw(repeated(self._forward(ids, positions, masks), self.copies))
        self.slot = torch.tensor([self.width], device=ids.device)
        for layer in self.layers:
            layer.slot = self.slot

    def states(self, newest: Tensor) -> Tensor:
        """As `Decoding.states`."""
        self.position += 1
        states = self._forward(newest, self.position, self._step_masks())
        self.slot += 1
        return states

    def _step_masks(self) -> Tensor | dict[str, Tensor]:
        """Return the mask of the window that the attention of a step reads."""
        window = self.layers[0].window
        slots = torch.arange(window, device=self.real.device)
        mask = self.real[:, :window] & (slots < self.width + self.step)
        return self._masks(mask[:, None, None], self.slot)

    def _masks(self, mask: Tensor, queries: Tensor | None) -> Tensor | dict[str, Tensor]:
        """Return the mask (B, 1, queries, slots) of every kind of attention layer: one, or one for each kind.

        `queries` are the slots of the new tokens, None for those of whole prompts. A layer with a sliding window reads
        the newest `sliding` slots; a prompt's padding is before it, so that slots are as far apart as positions. Where
        a model mixes kinds of layers, transformers takes a mask for each. In few kernels a step's mask is a bias of
        scores, to which attention would convert it in every layer.
        """
        masks = {"full_attention": mask}
        if self.sliding:
            slots = torch.arange(mask.shape[-1], device=mask.device)
            near = slots > (slots if queries is None else queries)[:, None] - self.sliding
            masks["sliding_attention"] = mask & near
        if queries is not None and FEW_KERNELS_BY_DEVICE[mask.device.type]:
            masks = {kind: self._as_bias(x) for kind, x in masks.items()}
        if not self.sliding:
            return masks["full_attention"]
        return masks if self.kinds else masks["sliding_attention"]

    def _as_bias(self, mask: Tensor) -> Tensor:
        """Return 0 where a mask is True and -inf elsewhere, in the model's type."""
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, -torch.inf)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | dict[str, Tensor] | None) -> Tensor:
        """Return the hidden states (B, H) of the last place."""
        states: Tensor = self.decoder(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=self.cache, use_cache=True
        ).last_hidden_state
        return states[:, -1]


@contextmanager
def few_kernels(model: Model) -> Iterator[None]:
    """Compute adapters and norms in few kernels where the device gains by it."""
    if not FEW_KERNELS_BY_DEVICE[model.device.type]:
        yield
        return
    with decoding_layers.fused_adapters(model), decoding_layers.fused_norms(model):
        yield


@contextmanager
def using_attention(model: Model, name: str) -> Iterator[None]:
    """Use another attention implementation inside the block."""
    usual = model.config._attn_implementation
    if usual == name:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(usual)


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `count`."""
    return -(-count // multiple) * multiple
