"""A forward and backward pass of Llama-like decoders in few operations, with the mathematics of the library's layers.

Policy, reference, reward model and critic differ only in their adapters. Four products (rlhf/models/products.py) and an
attention make a layer. The last layer is computed at the positions that are asked for. Layers below the first adapter
are the same for all roles, so that their result can be computed once and handed in (`Trunk.lower`). A prompt with
several responses in a batch is computed once, and each response attends to it (`SharedPrompts`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from rlhf.data.batch import Rollout
from rlhf.errors import UserError
from rlhf.models.architecture import sliding_window
from rlhf.models.products import Before, Gate, Node, Norm, Part, Product, Rotary, heads_of, part_of

SUPPORTED = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)
MERGED = {"cpu": True, "cuda": False}  # merge weights that are multiplied in float32


class Trunk:
    """The decoder of a base model whose linear layers may have adapters, one for each role.

    Raises UserError for a model that it does not support: another architecture or activation function, 4-bit weights.
    """

    def __init__(self, base: PreTrainedModel):
        if problem := unsupported(base):
            raise UserError(f"hardware.trunk: lean does not support {problem}: use hardware.trunk: library")
        self.base, self.decoder = base, base.get_decoder()
        self.eps = float(base.config.rms_norm_eps)
        self._merging: list[str] = []  # roles of the blocks that are open
        self._merged: dict[str, dict[tuple[nn.Module, ...], Tensor]] = {}

    def check_length(self, longest: int) -> None:
        """Raise UserError where sequences of `longest` tokens exceed a sliding window, which has no form here."""
        window = sliding_window(self.base.config)
        if window and longest > window:
            raise UserError(
                f"hardware.trunk: lean: sequences of {longest} tokens exceed the model's sliding window of {window}: "
                "use hardware.trunk: library"
            )

    @contextmanager
    def merging(self, role: str) -> Iterator[None]:
        """Merge weights at their first use in this block and keep them to its end. Adapters must not change in it."""
        self._merging.append(role)
        try:
            yield
        finally:
            self._merging.pop()
            if role not in self._merging:
                self._merged.pop(role, None)

    @property
    def first_adapted(self) -> int:
        """Return the number of the first layer that has an adapter, of any role; the number of layers without one."""
        layers = self.decoder.layers
        adapted = (n for n, layer in enumerate(layers) if any(isinstance(m, LoraLayer) for m in layer.modules()))
        return next(adapted, len(layers))

    @torch.no_grad()
    def lower(self, ids: Tensor) -> Tensor:
        """Return the hidden states (B, T, H) that go into the first layer with an adapter, the same for all roles."""
        states = self._embed(ids)
        return self._layers(states, "base", range(self.first_adapted), Sequences(self._rotary(states)))

    def hidden(self, role: str, ids: Tensor, at: Tensor | None = None, lower: Tensor | None = None) -> Tensor:
        """Return final-norm hidden states of a role, (B, T, H) or (B, R, H) at the positions `at`.

        Shapes: ids (B, T) int64, padded on the right; at (B, R) int64; lower (B, T, H), the result of `lower` for
        `ids`. The role `base` has no adapters.
        """
        states = self._embed(ids) if lower is None else lower
        return self._upper(role, states, Sequences(self._rotary(states), at), lower is not None)

    def response_hidden(self, role: str, rollout: Rollout) -> Tensor:
        """Return the hidden states (B, R, H) from which the response tokens are predicted, each prompt computed once.

        The prompts of neighbouring rows with the same number in `rollout.groups` are the same.
        """
        numbers = None if rollout.groups is None else rollout.groups.tolist()
        if numbers is None or len(set(numbers)) == len(numbers):
            return self.hidden(role, rollout.ids, rollout.predictors, rollout.lower)
        states = self._embed(rollout.ids) if rollout.lower is None else rollout.lower
        layout = SharedPrompts(self._rotary(states), rollout, numbers)
        packed = self._upper(role, layout.pack(states), layout, rollout.lower is not None)
        return layout.responses(packed)

    def _embed(self, ids: Tensor) -> Tensor:
        states: Tensor = self.decoder.embed_tokens(ids)
        return states.detach()

    def _rotary(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (T, D/2) of the positions of states (B, T, H)."""
        length = states.shape[1]
        self.check_length(length)
        tables = self.decoder.rotary_emb(states, torch.arange(length, device=states.device)[None])
        cos, sin = (table[0].chunk(2, -1)[0] for table in tables)  # both halves are equal
        return cos, sin

    def _upper(self, role: str, states: Tensor, layout: "Sequences | SharedPrompts", from_lower: bool) -> Tensor:
        """Return final-norm hidden states where `layout` wants them, from embeddings or lower states."""
        start = self.first_adapted if from_lower else 0
        normed: Tensor = self.decoder.norm(self._layers(states, role, range(start, len(self.decoder.layers)), layout))
        return normed

    def _layers(self, x: Tensor, role: str, numbers: range, layout: "Sequences | SharedPrompts") -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            for number in numbers:
                last = number == len(self.decoder.layers) - 1
                x = self._layer(self.decoder.layers[number], role, x, layout, last)
        return x

    def _layer(self, layer: Any, role: str, x: Tensor, layout: "Sequences | SharedPrompts", last: bool) -> Tensor:
        """Return x (B, T, H) after a layer; after the last one of the decoder, where `layout` wants it."""
        attention, mlp = layer.self_attn, layer.mlp
        norm = Norm(layer.input_layernorm.weight, self.eps)
        size, (cos, sin) = attention.head_dim, layout.rotary
        heads, shared_heads = (self.base.config.num_attention_heads, self.base.config.num_key_value_heads)
        if last and layout.narrow:
            rotary = Rotary(cos, sin, shared_heads)
            kv = self._product(x, role, (attention.k_proj, attention.v_proj), norm, rotary)
            k, v = heads_of(kv, size).chunk(2, 2)
            x = layout.wanted(x)
            rotary = Rotary(*layout.wanted_rotary, heads)
            q = heads_of(self._product(x, role, (attention.q_proj,), norm, rotary), size)
        else:
            rotary = Rotary(cos, sin, heads + shared_heads)
            qkv = self._product(x, role, (attention.q_proj, attention.k_proj, attention.v_proj), norm, rotary)
            q, k, v = heads_of(qkv, size).split([heads, shared_heads, shared_heads], 2)
        mixed = layout.attend(q, k, v, last and layout.narrow)
        x = self._product(mixed.flatten(2), role, (attention.o_proj,), residual=x)
        norm = Norm(layer.post_attention_layernorm.weight, self.eps)
        gate_up = self._product(x, role, (mlp.gate_proj, mlp.up_proj), norm)
        return self._product(gate_up, role, (mlp.down_proj,), Gate(), residual=x)

    def _product(
        self,
        x: Tensor,
        role: str,
        layers: tuple[nn.Module, ...],
        before: Before | None = None,
        after: Rotary | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return the results (B, T, sum of out) of linear layers with the same input, side by side."""
        parts = [part_of(layer, role) for layer in layers]
        adapters = [weight for part in parts for weight in part.adapter]
        product = Product(parts, self._merged_weight(x, role, layers, parts), before or Before(), after)
        result: Tensor = Node.apply(x, product, residual, *adapters)  # type: ignore[no-untyped-call]
        return result

    @torch.no_grad()
    def _merged_weight(
        self, x: Tensor, role: str, layers: tuple[nn.Module, ...], parts: Sequence[Part]
    ) -> Tensor | None:
        """Return the weights (sum of out, in) with the adapters in them, None where the products stay apart."""
        wanted = x.dtype == torch.float32 and MERGED[x.device.type] and any(part.adapter for part in parts)
        if not wanted or role not in self._merging:
            return None
        kept = self._merged.setdefault(role, {})
        if layers not in kept:
            merged = kept[layers] = x.new_empty(sum(len(part.weight) for part in parts), parts[0].weight.shape[1])
            for part, rows in zip(parts, merged.split([len(part.weight) for part in parts]), strict=True):
                rows.copy_(part.weight)
                if part.adapter:
                    a, b = part.adapter
                    rows.addmm_(b, a, alpha=part.scaling)
        return kept[layers]


def unsupported(base: PreTrainedModel) -> str | None:
    """Return what of a base model without adapters the lean trunk does not support, None where it supports all."""
    config = base.config
    if type(base) not in SUPPORTED:
        return f"{type(base).__name__}, only {', '.join(kind.__name__ for kind in SUPPORTED)}"
    if config.hidden_act != "silu":
        return f"the activation function {config.hidden_act}"
    if getattr(config, "use_sliding_window", False):
        return "a sliding window in some layers"
    if any(isinstance(m, nn.Linear) and type(m) is not nn.Linear for m in base.get_decoder().modules()):
        return "4-bit weights"
    return None


# -- which tokens attend to which --------------------------------------------------------------------------------------


class Sequences:
    """Rows of tokens (B, T), each of which attends to those before it; wanted at all positions or at `at` (B, R)."""

    def __init__(self, rotary: tuple[Tensor, Tensor], at: Tensor | None = None):
        cos, sin = rotary
        self.rotary = cos[None], sin[None]
        self.at, self.narrow = at, at is not None
        if at is not None:
            self.wanted_rotary = cos[at], sin[at]
            self.mask = torch.arange(len(cos), device=at.device) <= at[..., None]  # (B, R, T)

    def wanted(self, x: Tensor) -> Tensor:
        """Return x (B, T, H) at the wanted positions, (B, R, H)."""
        assert self.at is not None
        return x.gather(1, self.at[..., None].expand(-1, -1, x.shape[-1]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, narrow: bool) -> Tensor:
        """Return what attention mixes, (B, T, heads, D), for queries of all positions or, if `narrow`, the wanted."""
        return attention(q, k, v, self.mask if narrow else None)


class SharedPrompts:
    """Prompts and responses to them, packed into one row of tokens: P prompts (P, S), then B responses (B, R - 1).

    The last token of a response predicts nothing and is left out. Wanted are the last tokens of the prompts and all of
    the responses. `numbers`: the prompt of each row of `rollout`, rows of one prompt side by side.
    """

    narrow = True

    def __init__(self, rotary: tuple[Tensor, Tensor], rollout: Rollout, numbers: Sequence[int]):
        cos, sin = rotary
        first = [row for row, number in enumerate(numbers) if row == 0 or number != numbers[row - 1]]
        group = [sum(row >= start for start in first) - 1 for row in range(len(numbers))]
        device = rollout.ids.device
        self.first, self.group = torch.tensor(first, device=device), torch.tensor(group, device=device)
        lengths = rollout.prompt_length
        self.last = lengths[self.first, None] - 1  # (P, 1)
        self.prompts, self.prompt_size = len(first), int(lengths.max())
        self.width = rollout.mask.shape[1]
        slots = torch.arange(max(self.width - 1, 1), device=device)
        self.rows, self.slots = len(numbers), len(slots)
        self.positions = (lengths[:, None] + slots).clamp(max=rollout.ids.shape[1] - 1)  # (B, R - 1)
        places = torch.arange(self.prompt_size, device=device)
        positions = torch.cat([places.repeat(self.prompts), self.positions.flatten()])
        self.rotary = cos[positions][None], sin[positions][None]
        positions = torch.cat([self.last.flatten(), self.positions.flatten()])
        self.wanted_rotary = cos[positions][None], sin[positions][None]
        self.prompt_mask = places <= self.last[..., None]  # (P, 1, S), for the last token
        prompt = (places < lengths[:, None])[:, None].expand(-1, self.slots, -1)
        own = (slots <= slots[:, None]).expand(self.rows, -1, -1)
        self.mask = torch.cat([prompt, own], 2)  # (B, R - 1, S + R - 1)

    def pack(self, x: Tensor) -> Tensor:
        """Return the tokens' states (1, N, H), of x (B, T, H) with a prompt in each row."""
        responses = x.gather(1, self.positions[..., None].expand(-1, -1, x.shape[-1]))
        return self._packed(x[self.first, : self.prompt_size], responses)

    def wanted(self, x: Tensor) -> Tensor:
        """Return the states (1, P + B * (R - 1), H) of the prompts' last tokens and of the responses."""
        prompts, responses = self._parts(x)
        last = prompts.gather(1, self.last[..., None].expand(-1, -1, x.shape[-1]))
        return self._packed(last, responses)

    def responses(self, x: Tensor) -> Tensor:
        """Return the wanted states as (B, R, H): before each token of a response."""
        before, inside = self._parts(x, 1)
        return torch.cat([before[self.group], inside], 1)[:, : self.width]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, narrow: bool) -> Tensor:
        """Return what attention mixes, as `Sequences.attend`. A response attends to its prompt and to itself."""
        (k_prompt, k_own), (v_prompt, v_own) = self._parts(k), self._parts(v)
        q_prompt, q_own = self._parts(q, 1 if narrow else None)
        prompts = attention(q_prompt, k_prompt, v_prompt, self.prompt_mask if narrow else None)
        k_all = torch.cat([k_prompt[self.group], k_own], 1)
        v_all = torch.cat([v_prompt[self.group], v_own], 1)
        return self._packed(prompts, attention(q_own, k_all, v_all, self.mask))

    def _parts(self, x: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the prompts (P, `size` or S, …) and the responses (B, R - 1, …) of x (1, N, …)."""
        size = size or self.prompt_size
        prompts, responses = x[0].split([self.prompts * size, self.rows * self.slots])
        return prompts.unflatten(0, (self.prompts, size)), responses.unflatten(0, (self.rows, self.slots))

    def _packed(self, prompts: Tensor, responses: Tensor) -> Tensor:
        return torch.cat([prompts.flatten(0, 1), responses.flatten(0, 1)])[None]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v, (B, Q, heads, D); causal without a mask (B, Q, K).

    Shapes: q (B, Q, heads, D); k, v (B, K, shared heads, D).
    """
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None],
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return mixed.transpose(1, 2)
