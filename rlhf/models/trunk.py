"""A forward and backward pass of Llama-like decoders in few operations, with the mathematics of the library's layers.

Policy, reference, reward model and critic differ only in their adapters. Here each group of linear layers with the
same input is one autograd node, together with what comes before and after the product:

    q, k, v     rotary(rms_norm(x) W^T + b)
    o           x W^T + b + residual
    gate, up    rms_norm(x) W^T + b
    down        (silu(g) * u) W^T + b + residual          of x = [g, u]

with W_i + s_i B_i A_i for the weight of each layer i of the group. A node keeps its input and nothing else: the
backward pass computes the norm or the activation function again. With z the input of the product and dy the gradient
of its result,

    dB_i = s_i dy_i^T (z A_i^T)      dA_i = s_i (dy_i B_i)^T z      dz = sum_i dy_i (W_i + s_i B_i A_i)

The products with A and B have r columns. In float32 on a CPU they are slow beside the large ones. There each weight is
merged with its adapter once in a block of `Trunk.merging`, for y and dz; the copies need the memory of the weights that
have adapters. Otherwise the products stay apart, because a sum rounded to bfloat16 would lose small changes of B A.

The last layer is computed at the positions that are asked for. Layers below the first adapter are the same for all
roles, so that their result can be computed once and handed in (`Trunk.lower`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from rlhf.errors import UserError
from rlhf.objectives.masked import at_least_float32

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
        return self._layers(self._embed(ids), "base", range(self.first_adapted))

    def hidden(self, role: str, ids: Tensor, at: Tensor | None = None, lower: Tensor | None = None) -> Tensor:
        """Return final-norm hidden states of a role, (B, T, H) or (B, R, H) at the positions `at`.

        Shapes: ids (B, T) int64, padded on the right; at (B, R) int64; lower (B, T, H), the result of `lower` for
        `ids`. The role `base` has no adapters.
        """
        start = 0 if lower is None else self.first_adapted
        states = self._embed(ids) if lower is None else lower
        states = self._layers(states, role, range(start, len(self.decoder.layers)), at)
        normed: Tensor = self.decoder.norm(states)
        return normed

    def _embed(self, ids: Tensor) -> Tensor:
        states: Tensor = self.decoder.embed_tokens(ids)
        return states.detach()

    def _layers(self, x: Tensor, role: str, numbers: range, at: Tensor | None = None) -> Tensor:
        """Return x (B, T, H) after some layers; with `at`, the last layer of the decoder at these positions only."""
        window = getattr(self.base.config, "sliding_window", None)
        if window and x.shape[1] > window:
            raise UserError(f"sequences of {x.shape[1]} tokens exceed the model's sliding window of {window}")
        with torch.autocast(x.device.type, enabled=False):
            positions = torch.arange(x.shape[1], device=x.device)[None]
            cos, sin = (table.chunk(2, -1)[0] for table in self.decoder.rotary_emb(x, positions))  # halves are equal
            for number in numbers:
                last = number == len(self.decoder.layers) - 1
                x = self._layer(self.decoder.layers[number], role, x, cos, sin, at if last else None)
        return x

    def _layer(self, layer: Any, role: str, x: Tensor, cos: Tensor, sin: Tensor, at: Tensor | None) -> Tensor:
        attention, mlp = layer.self_attn, layer.mlp
        norm = _Norm(layer.input_layernorm.weight, self.eps)
        size = attention.head_dim
        heads, shared_heads = (self.base.config.num_attention_heads, self.base.config.num_key_value_heads)
        if at is None:
            rotary = _Rotary(cos, sin, heads + shared_heads)
            qkv = self._product(x, role, (attention.q_proj, attention.k_proj, attention.v_proj), norm, rotary)
            q, k, v = (part.transpose(1, 2) for part in _heads(qkv, size).split([heads, shared_heads, shared_heads], 2))
            mask = None
        else:
            rotary = _Rotary(cos, sin, shared_heads)
            kv = self._product(x, role, (attention.k_proj, attention.v_proj), norm, rotary)
            k, v = (part.transpose(1, 2) for part in _heads(kv, size).chunk(2, 2))
            mask = (torch.arange(x.shape[1], device=x.device) <= at[..., None])[:, None]  # (B, 1, R, T)
            x = x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))
            rotary = _Rotary(cos[0, at], sin[0, at], heads)
            q = _heads(self._product(x, role, (attention.q_proj,), norm, rotary), size).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != shared_heads
        )
        x = self._product(mixed.transpose(1, 2).flatten(2), role, (attention.o_proj,), residual=x)
        norm = _Norm(layer.post_attention_layernorm.weight, self.eps)
        gate_up = self._product(x, role, (mlp.gate_proj, mlp.up_proj), norm)
        return self._product(gate_up, role, (mlp.down_proj,), _Gate(), residual=x)

    def _product(
        self,
        x: Tensor,
        role: str,
        layers: tuple[nn.Module, ...],
        before: "_Before | None" = None,
        after: "_Rotary | None" = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return the results (B, T, sum of out) of linear layers with the same input, side by side."""
        parts = [_part(layer, role) for layer in layers]
        adapters = [weight for part in parts for weight in part.adapter]
        product = _Product(parts, self._merged_weight(x, role, layers, parts), before or _Before(), after)
        result: Tensor = _Node.apply(x, product, residual, *adapters)  # type: ignore[no-untyped-call]
        return result

    @torch.no_grad()
    def _merged_weight(
        self, x: Tensor, role: str, layers: tuple[nn.Module, ...], parts: Sequence["_Part"]
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


# -- a product with what comes before and after it ---------------------------------------------------------------------


class _Part(NamedTuple):
    """One linear layer, W + scaling * B A."""

    weight: Tensor  # (out, in), frozen
    bias: Tensor | None  # (out,), frozen
    adapter: tuple[Tensor, ...]  # A (r, in) and B (out, r), or empty
    scaling: float


def _part(layer: Any, role: str) -> _Part:
    if not isinstance(layer, LoraLayer):
        return _Part(layer.weight, layer.bias, (), 0.0)
    base: Any = layer.get_base_layer()
    if role not in layer.lora_A:
        return _Part(base.weight, base.bias, (), 0.0)
    a, b = (weights[role].weight for weights in (layer.lora_A, layer.lora_B))
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    return _Part(base.weight, base.bias, (a, b), layer.scaling[role])


class _Before:
    """What comes before a product: nothing. Works on x (N, in), and returns what `backward` needs beside the result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def backward(self, dz: Tensor, x: Tensor, kept: Tensor) -> Tensor:
        return dz


class _Norm(_Before):
    """RMSNorm: z = w * x / sqrt(mean(x^2) + eps), in float32, rounded once."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = at_least_float32(x)
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(self.eps).rsqrt_()  # (N, 1)
        return (wide * scale).mul_(self.weight).to(x.dtype), scale

    def backward(self, dz: Tensor, x: Tensor, kept: Tensor) -> Tensor:
        """dx = scale * (g - x * scale^2 * mean(g * x)) with g = w * dz."""
        wide, slope = at_least_float32(x), dz * at_least_float32(self.weight)
        mean = torch.linalg.vecdot(slope, wide).div_(x.shape[-1]).unsqueeze(-1)
        return slope.addcmul_(wide, mean.mul_(kept).mul_(kept), value=-1).mul_(kept).to(x.dtype)


class _Gate(_Before):
    """SwiGLU: z = silu(g) * u of x = [g, u]."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = x.chunk(2, -1)
        open_ = F.silu(gate)
        return open_ * up, open_

    def backward(self, dz: Tensor, x: Tensor, kept: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        to_gate, to_up = dx.chunk(2, -1)
        torch.mul(dz, kept, out=to_up)
        torch.ops.aten.silu_backward.grad_input(dz * up, gate, grad_input=to_gate)
        return dx


class _Rotary(NamedTuple):
    """Rotary embedding of the first `heads` heads of each token.

    Pairs (x_j, x_{j + D/2}) turn by the angles whose cosines and sines (1 or B, T, D/2) are given.
    """

    cos: Tensor
    sin: Tensor
    heads: int

    def turn(self, y: Tensor, back: bool = False) -> Tensor:
        """Turn y (B, T, out) in place, forward or back; return it."""
        cos, sin = self.cos.unsqueeze(2), self.sin.unsqueeze(2)
        first, second = _heads(y, 2 * cos.shape[-1])[:, :, : self.heads].chunk(2, -1)
        sign = -1 if back else 1
        turned = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-sign)
        second.mul_(cos).add_(turned, alpha=sign)
        return y


def _heads(x: Tensor, size: int) -> Tensor:
    """Return x (B, T, heads * size) as (B, T, heads, size)."""
    return x.view(*x.shape[:-1], -1, size)


class _Product(NamedTuple):
    """The products of one group of linear layers, and what comes before and after them."""

    parts: Sequence[_Part]
    merged: Tensor | None  # (sum of out, in)
    before: _Before
    after: _Rotary | None

    @property
    def sizes(self) -> list[int]:
        return [len(part.weight) for part in self.parts]

    def forward(self, z: Tensor) -> Tensor:
        """Return y (N, sum of out) for z (N, in)."""
        if self.merged is not None:
            y = torch.mm(z, self.merged.t())
        else:
            y = z.new_empty(len(z), sum(self.sizes))
            low = self._low(z)
            for part, columns in zip(self.parts, y.split(self.sizes, 1), strict=True):
                torch.mm(z, part.weight.t(), out=columns)
                if part.adapter:
                    columns.addmm_(low.pop(0).t(), part.adapter[1].to(z.dtype).t(), alpha=part.scaling)
        for part, columns in zip(self.parts, y.split(self.sizes, 1), strict=True):
            if part.bias is not None:
                columns.add_(part.bias)
        return y

    def backward(self, dy: Tensor, z: Tensor, needs_input: bool, adapters: bool) -> tuple[Tensor | None, list[Tensor]]:
        """Return dz (N, in), and the gradients of A and B of each part that has them, if `adapters`."""
        columns = dy.split(self.sizes, 1)
        adapted = [(part, d) for part, d in zip(self.parts, columns, strict=True) if part.adapter]
        # (r, N) each: s B^T dy^T. On a CPU the product with few rows is 2 to 4 times as fast as that with few columns.
        slopes = [torch.mm(part.adapter[1].to(d.dtype).t(), d.t()).mul_(part.scaling) for part, d in adapted]
        dz = None
        if needs_input and self.merged is not None:
            dz = torch.mm(dy, self.merged)
        elif needs_input:
            dz = torch.mm(columns[0], self.parts[0].weight)
            for part, d in list(zip(self.parts, columns, strict=True))[1:]:
                dz.addmm_(d, part.weight)
            for (part, _), slope in zip(adapted, slopes, strict=True):
                dz.addmm_(slope.t(), part.adapter[0].to(slope.dtype))
        gradients: list[Tensor] = []
        if adapters:
            to_a = torch.mm(torch.cat(slopes), z).split([len(slope) for slope in slopes])
            for (part, d), low, da in zip(adapted, self._low(z), to_a, strict=True):
                a, b = part.adapter
                gradients += [da.to(a.dtype), torch.mm(low, d).mul_(part.scaling).t().to(b.dtype)]
        return dz, gradients

    def _low(self, z: Tensor) -> list[Tensor]:
        """Return A z^T (r, N) of each part with an adapter, from one product."""
        downs = [part.adapter[0].to(z.dtype) for part in self.parts if part.adapter]
        return list(torch.mm(torch.cat(downs), z.t()).split([len(a) for a in downs])) if downs else []


class _Node(torch.autograd.Function):
    """A product as one node: (x (B, T, in), product, residual (B, T, out), A and B of each adapter) -> (B, T, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, product: _Product, residual: Tensor | None, *adapters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.product = product
        z, _ = product.before.forward(x.reshape(-1, x.shape[-1]))
        y = product.forward(z).view(*x.shape[:-1], -1)
        if product.after is not None:
            product.after.turn(y)
        return y if residual is None else y.add_(residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), product, (dy,) = ctx.saved_tensors, ctx.product, gradients
        needs_input, _, needs_residual, *needs_adapters = ctx.needs_input_grad
        to_residual = dy if needs_residual else None
        if product.after is not None:
            dy = product.after.turn(dy.clone(memory_format=torch.contiguous_format), back=True)
        rows, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        z, kept = product.before.forward(rows)
        dz, to_adapters = product.backward(dy, z, needs_input, any(needs_adapters))
        dx = None if dz is None else product.before.backward(dz, rows, kept).view(x.shape)
        return dx, None, to_residual, *(to_adapters or [None] * len(needs_adapters))
