"""A forward and backward pass of Llama-like decoders in few operations, with the mathematics of the library's layers.

Policy, reference, reward model and critic differ only in their adapters. A layer consists of four products
(fused_linear.py) and one attention. The last layer is computed at the positions that are asked for, with five products:
one for the queries, and one for keys and values. layouts.py says which tokens attend to which: whole sequences, a
prompt that is computed once for several responses, or one token at a time of each response while responses are sampled.
On a card in 16 bits, rows are joined without their padding (packed.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf.data.batch import Rollout, on_device
from rlhf.errors import UserError
from rlhf.models.lean.fused_linear import (
    AdaptedLinear,
    FusedLinear,
    HeadNorm,
    InputOp,
    LinearGroup,
    LowRank,
    Norm,
    OutputOp,
    Rotary,
    SwiGLU,
    adapted_linear,
    heads_of,
)
from rlhf.models.lean.layouts import DecodingLayout, Layout, PrefillLayout, Sequences, SharedPrompts
from rlhf.models.lean.packed import (
    GrowingRows,
    JoinedPrompts,
    Packed,
    Piece,
    pieces_of,
    pieces_of_pairs,
    suits,
    whole_rows,
)
from rlhf.models.matmul import round_to_few_sizes
from rlhf.models.nf4 import is_packed
from rlhf.models.traits import LENGTH_DEPENDENT_ROPE, sliding_window
from rlhf.recipe.model_types import LEAN_TYPES
from rlhf.recipe.stages import Role

Layers = tuple[nn.Module, ...]  # linear layers with the same input
ONEDNN_BY_DEVICE = {"cpu": True, "cuda": False}  # products in float32 by oneDNN: weights merged, shapes padded


class LeanTrunk:
    """The decoder of a base model whose linear layers may have adapters, one for each role.

    A role is the name of an adapter: a `Role` on a shared base, peft's own name in a trainer. The role `base` has no
    adapters.
    Layers whose activations the library would recompute (gradient checkpointing) are recomputed here too.
    `joins`: rows lie side by side without their padding, and responses are sampled here, on a card in 16 bits.
    The base is one that `check_supported` lets through.
    """

    def __init__(self, base: PreTrainedModel, joins: bool = False):
        self.base, self.decoder, self.joins = base, base.get_decoder(), joins
        self.eps = float(base.config.rms_norm_eps)
        self._packed = any(map(is_packed, base.modules()))  # a merged copy would unpack them for good
        self._kept: dict[str, dict[Layers, Weights]] = {}  # of the roles in open blocks

    @contextmanager
    def merging(self, role: str) -> Iterator[None]:
        """Cast adapters and merge weights once, at their first use; keep them to the end of the outermost such block.

        Adapters must not change in it.
        """
        outermost = role not in self._kept
        if outermost:
            self._kept[role] = {}
        try:
            yield
        finally:
            if outermost:
                del self._kept[role]

    def hidden(self, role: str, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return final-norm hidden states of a role, (B, T, H) or (B, R, H) at the `positions`.

        Shapes: ids (B, T) int64, padded on the right; positions (B, R) int64.
        """
        states = self._padded(self._embed(ids))
        selected = None if positions is None else self._padded(positions[..., None]).squeeze(-1)
        layout = Sequences(self._rotary(states.shape[1]), selected)
        hidden = self._final_states(role, states, layout)
        return hidden[:, : (ids if positions is None else positions).shape[1]]

    def response_hidden(self, role: str, rollout: Rollout) -> Tensor:
        """Return the hidden states (B, R, H) from which the response tokens are predicted, each prompt computed once.

        The prompts of neighbouring rows with the same number in `rollout.prompt_numbers` are the same.
        """
        if self.packs:
            pieces, slots = pieces_of(rollout.lengths)
            return self._joined(role, rollout.ids, pieces)[on_device(slots, rollout.ids.device)]
        numbers = rollout.prompt_numbers
        if numbers is None or not (numbers[1:] == numbers[:-1]).any():
            return self.hidden(role, rollout.ids, rollout.predictors)
        states = self._embed(rollout.ids)
        layout = SharedPrompts(self._rotary(states.shape[1]), rollout, numbers, self._round_up)
        return layout.responses(self._final_states(role, layout.join(states), layout))

    def last_hidden(self, role: str, ids: Tensor, last: Tensor) -> Tensor:
        """Return the final-norm hidden states (B, H) of ids (B, T) at the position `last` (B,) of each row."""
        if self.packs:
            return self._joined(role, ids, whole_rows((last + 1).tolist()))[: len(ids)]
        return self.hidden(role, ids, last.to(ids.device)[:, None]).squeeze(1)

    def pair_hidden(self, role: str, ids: Tensor, last: Tensor) -> Tensor:
        """Return `last_hidden` of joined rows of pairs: what rows n and B / 2 + n begin with is computed once."""
        states = self._joined(role, ids, pieces_of_pairs(ids, (last + 1).tolist()))[: len(ids)]
        chosen, rejected = states[::2], states[1::2]
        return torch.cat([chosen, rejected])

    def _joined(self, role: str, ids: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Return the final-norm hidden states (M or more, H) of the selected tokens of pieces of ids (B, T)."""
        layout = Packed(self._rotary(ids.shape[1]), ids.shape[1], pieces)
        return self._final_states(role, self._embed(layout.join(ids)), layout).squeeze(0)

    @property
    def packs(self) -> bool:
        """Return whether rows are joined without padding: where the recipe says so, and attention has a way for it."""
        return self.joins and suits(self.decoder.embed_tokens.weight, self.decoder.layers[0].self_attn.head_dim)

    @property
    def merges(self) -> bool:
        """Return whether weights are merged with their adapters in a block of `merging`."""
        return self.rounds and not self._packed

    @property
    def rounds(self) -> bool:
        """Return whether shapes are padded to few sizes, because oneDNN compiles code for every new one."""
        weight = self.decoder.embed_tokens.weight
        return weight.dtype == torch.float32 and ONEDNN_BY_DEVICE[weight.device.type]

    @property
    def decodes(self) -> bool:
        """Return whether responses are sampled with the trunk: in float32 on a CPU, and where rows are joined.

        Weights in 4 bits would be unpacked for every token; the library's layers multiply with them as they are.
        """
        return self.merges or (self.packs and not self._packed)

    @torch.no_grad()
    def prefill(
        self, role: str, ids: Tensor, lengths: Sequence[int], copies: int, room: int
    ) -> tuple[Tensor, PrefillLayout | JoinedPrompts]:
        """Run prompts; return the hidden states (P, H) of their last tokens, and their keys and values.

        Shapes: ids (P, S), padded on the right; P lengths. Each prompt may get `copies` responses of `room` tokens.
        """
        if not self.merges:
            joined = JoinedPrompts(self._rotary(ids.shape[1] + room), ids.shape[1], lengths, copies, room)
            return self._final_states(role, self._embed(joined.join(ids)), joined).squeeze(0), joined
        states = self._padded(self._embed(ids))
        tables, on_cpu = self._rotary(states.shape[1] + room), torch.tensor(lengths, device=ids.device)
        layout = PrefillLayout(tables, on_cpu, states.shape[1], copies, room)
        return self._final_states(role, states, layout).squeeze(1), layout

    @torch.no_grad()
    def decode(self, role: str, newest: Tensor, layout: DecodingLayout | GrowingRows) -> Tensor:
        """Return the hidden states (B, H) of the newest tokens (B, 1) of responses."""
        layout.next_token()
        return self._final_states(role, self._embed(newest), layout).squeeze(1)

    def _round_up(self, count: int) -> int:
        return round_to_few_sizes(count) if self.rounds else count

    def _padded(self, x: Tensor) -> Tensor:
        """Return x (B, T, H) padded with zeros to one of few lengths where `rounds` says so."""
        extra = self._round_up(x.shape[1]) - x.shape[1]
        return F.pad(x, (0, 0, 0, extra)) if extra else x

    def _embed(self, ids: Tensor) -> Tensor:
        states: Tensor = self.decoder.embed_tokens(ids)
        return states.detach()

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the tables of `Rotary` (T, D) for the positions before `length`."""
        weight = self.decoder.embed_tokens.weight  # has type and device of the states
        tables = self.decoder.rotary_emb(weight, torch.arange(length, device=weight.device)[None])
        cos, sin = (table[0] for table in tables)  # both halves are equal
        first, second = sin.chunk(2, -1)
        return cos, torch.cat([-first, second], -1)

    def _final_states(self, role: str, x: Tensor, layout: Layout) -> Tensor:
        """Return the final-norm hidden states at the positions that `layout` selects, from embeddings x (B, T, H)."""
        with torch.autocast(x.device.type, enabled=False):
            for number, layer in enumerate(self.decoder.layers):
                last = number == len(self.decoder.layers) - 1
                if torch.is_grad_enabled() and layer.training and getattr(layer, "gradient_checkpointing", False):
                    # Nothing in a layer is drawn at random. To keep the generators' states, each layer would wait for
                    # the card.
                    arguments = (number, role, x, layout, last)
                    x = checkpoint(self._layer, *arguments, use_reentrant=False, preserve_rng_state=False)
                else:
                    x = self._layer(number, role, x, layout, last)
        normed: Tensor = self.decoder.norm(x)
        return normed

    def _layer(self, number: int, role: str, x: Tensor, layout: Layout, last: bool) -> Tensor:
        """Return the output of one layer for x (B, T, H); the last layer's at the positions that `layout` selects."""
        layer: Any = self.decoder.layers[number]
        attention = layer.self_attn
        all_qkv, o, both_gates, down = _groups_of(layer)
        norm = Norm(layer.input_layernorm.weight, self.eps)
        head_dim, (cos, sin) = attention.head_dim, layout.rotary
        query_heads, kv_heads = (self.base.config.num_attention_heads, self.base.config.num_key_value_heads)
        linear = partial(self._linear, role)
        output_op = partial(self._output_op, attention)
        if last and layout.selects:
            after = output_op(cos, sin, 0, kv_heads)
            kv = heads_of(linear(x, all_qkv[1:], norm, after), head_dim)
            layout.store(number, kv, 0)
            k, v = kv.chunk(2, 2)
            x = layout.selected(x)
            after = output_op(*layout.selected_rotary, query_heads, 0)
            q = heads_of(linear(x, all_qkv[:1], norm, after), head_dim)
        else:
            after = output_op(cos, sin, query_heads, kv_heads)
            qkv = heads_of(linear(x, all_qkv, norm, after), head_dim)
            layout.store(number, qkv, query_heads)
            q, k, v = qkv.split([query_heads, kv_heads, kv_heads], 2)
        mixed = layout.attend(number, q, k, v, last and layout.selects)
        x = linear(mixed.flatten(2), o, residual=x)
        norm = Norm(layer.post_attention_layernorm.weight, self.eps)
        gate_up = linear(x, both_gates, norm)
        return linear(gate_up, down, SwiGLU(), residual=x)

    def _output_op(self, attention: Any, cos: Tensor, sin: Tensor, queries: int, keys: int) -> OutputOp:
        """Return the step after the product that gives `queries` heads of queries and `keys` heads of keys."""
        rotary = Rotary(cos, sin, queries + keys)
        if not hasattr(attention, "q_norm"):
            return rotary
        weights = [(attention.q_norm.weight, queries), (attention.k_norm.weight, keys)]
        return HeadNorm(Norm(torch.cat([weight.expand(n, -1) for weight, n in weights]), self.eps), rotary)

    def _linear(
        self,
        role: str,
        x: Tensor,
        layers: Layers,
        before: InputOp | None = None,
        after: OutputOp | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return the results (B, T, sum of out) of linear layers with the same input, side by side."""
        weights = self._weights(role, layers, x.dtype)
        adapters = [weight for part in weights.parts for weight in part.adapter]
        product = LinearGroup(*weights, before or InputOp(), after)
        if not torch.is_grad_enabled():  # without the costs of a node
            return product.computed(x, residual)[0]
        fused: Callable[..., Tensor] = FusedLinear.apply  # annotated from torch 2.15 on
        return fused(x, product, residual, *adapters)

    def _weights(self, role: str, layers: Layers, dtype: torch.dtype) -> "Weights":
        """Return layers with a role's adapters, in the type of the products; in a block of `merging` made once."""
        kept = self._kept.get(role)
        if kept and layers in kept:
            return kept[layers]
        parts = [adapted_linear(layer, role) for layer in layers]
        low_rank = LowRank.of(parts, dtype)
        merges = self.merges and kept is not None and low_rank is not None
        made = Weights(parts, low_rank, _merged(parts) if merges else None)
        if kept is not None:
            kept[layers] = made
        return made


class Weights(NamedTuple):
    """What `LinearGroup` multiplies with."""

    parts: list[AdaptedLinear]
    low_rank: LowRank | None
    merged: Tensor | None


@torch.no_grad()
def _merged(parts: Sequence[AdaptedLinear]) -> Tensor:
    """Return the weights (sum of out, in) of layers with their adapters in them, float32."""
    sizes = [part.layer.out_features for part in parts]
    merged = parts[0].layer.weight.new_empty(sum(sizes), parts[0].layer.in_features)
    for part, rows in zip(parts, merged.split(sizes), strict=True):
        weight = part.weight(torch.float32)
        if part.adapter:
            a, b = part.adapter
            torch.addmm(weight, b, a, alpha=part.scaling, out=rows)
        else:
            rows.copy_(weight)
    return merged


def _groups_of(layer: Any) -> tuple[Layers, Layers, Layers, Layers]:
    """Return the linear layers of a decoder layer, those with the same input together."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    return qkv, (attention.o_proj,), (mlp.gate_proj, mlp.up_proj), (mlp.down_proj,)


class RoleTrunk(NamedTuple):
    """A trunk and one of its roles."""

    trunk: LeanTrunk
    role: Role


def check_supported(config: PreTrainedConfig, longest: int) -> None:
    """Raise UserError for a model that the trunk does not support, or sequences of `longest` tokens of it."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    window = sliding_window(config)
    problem = None
    if config.model_type not in LEAN_TYPES:
        problem = f"a {config.model_type} model, only {', '.join(LEAN_TYPES)}"
    elif config.hidden_act != "silu":
        problem = f"the activation function {config.hidden_act}"
    elif window and longest > window:
        problem = f"sequences of {longest} tokens, which exceed the model's sliding window of {window}"
    elif rope in LENGTH_DEPENDENT_ROPE:
        problem = f"a rope of type {rope}, whose frequencies depend on the length"
    if problem:
        raise UserError(f"hardware.trunk: lean does not support {problem}: use hardware.trunk: library")
