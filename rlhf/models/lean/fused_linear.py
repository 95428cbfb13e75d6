"""Linear layers with adapters as autograd nodes, each with what comes before and after its product.

A group of linear layers with the same input is one node:

    q, k, v     rms_norm(x) W^T + b; then q and k get the rotary embedding, in Qwen3 after a norm of each head
    o           x W^T + b + residual
    gate, up    rms_norm(x) W^T + b
    down        (silu(g) * u) W^T + b + residual          of x = [g, u]

with W_i + s_i B_i A_i for the weight of each layer i of the group (LoRA, arXiv 2106.09685). A node saves its input and,
with `HeadNorm`, that norm's input; the backward pass computes the norm or the activation function again. With z the
input of the product and dy the gradient of its result,

    dB_i = s_i dy_i^T (z A_i^T)      dA_i = s_i (dy_i B_i)^T z      dz = sum_i dy_i (W_i + s_i B_i A_i)

The products with A and B have r columns. In float32 on a CPU they are slow beside the large ones, and not worth the
memory that oneDNN needs for each shape (rlhf/models/matmul.py). There each weight is merged with its adapter once in a
block of `LeanTrunk.merging`, for y and dz; the copies need the memory of the weights that have adapters. Otherwise the
products stay apart, because a sum rounded to bfloat16 would lose small changes of B A.

Adapters too are cast and stacked once in such a block (`LowRank`). s is part of a product, and gradients leave a
product in the type of the weights.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf.models.matmul import matmul, matmul_to, scaled_matmul
from rlhf.models.nf4 import unpacked
from rlhf.objectives.masked import at_least_float32


class AdaptedLinear(NamedTuple):
    """One linear layer, W + scaling * B A."""

    layer: nn.Linear  # (in, out), frozen; its weight may be packed in 4 bits
    adapter: tuple[Tensor, ...] = ()  # A (r, in) and B (out, r), or empty
    scaling: float = 0.0

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return W (out, in). 4-bit weights are unpacked at each call, as bitsandbytes does for this many rows."""
        return unpacked(self.layer).to(dtype)


def adapted_linear(layer: nn.Module, role: str) -> AdaptedLinear:
    """Return a linear layer with the adapter that it has for `role`, if it has one."""
    if not isinstance(layer, LoraLayer):
        assert isinstance(layer, nn.Linear)
        return AdaptedLinear(layer)
    base: Any = layer.get_base_layer()
    if role not in layer.lora_A:
        return AdaptedLinear(base)
    a, b = (weights[role].weight for weights in (layer.lora_A, layer.lora_B))
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    return AdaptedLinear(base, (a, b), layer.scaling[role])


class LowRank(NamedTuple):
    """The adapters of a group of linear layers with the same input, in the type in which they are multiplied."""

    down: Tensor  # the A of all, one below the other: (sum of r, in)
    ups: list[Tensor]  # the B (out, r) of each
    scaling: float
    stored: torch.dtype  # of the adapters themselves, and of their gradients

    @classmethod
    @torch.no_grad()
    def of(cls, parts: Sequence[AdaptedLinear], dtype: torch.dtype) -> "LowRank | None":
        """Return the adapters of `parts`, None if there are none. Raises ValueError where their scalings differ."""
        adapted = [part for part in parts if part.adapter]
        if not adapted:
            return None
        if len({part.scaling for part in adapted}) > 1:
            raise ValueError("adapters of one role have the same scaling in all layers")
        downs, ups = zip(*(part.adapter for part in adapted), strict=True)
        down = torch.cat([a.to(dtype) for a in downs])
        return cls(down, [b.to(dtype) for b in ups], adapted[0].scaling, downs[0].dtype)

    @property
    def ranks(self) -> list[int]:
        """Return the r of each adapter."""
        return [up.shape[1] for up in self.ups]

    def project(self, z: Tensor) -> tuple[Tensor, ...]:
        """Return s A z^T (r, N) of each adapter, from one product."""
        low: tuple[Tensor, ...] = scaled_matmul(self.down, z.t(), self.scaling).split(self.ranks)
        return low

    def gradients(self, columns: Sequence[Tensor]) -> Tensor:
        """Return s B^T dy^T of all adapters, one below the other (sum of r, N), for the dy (N, out) of each.

        On a CPU the product with few rows is 2 to 4 times as fast as that with few columns.
        """
        result = columns[0].new_empty(len(self.down), len(columns[0]))
        for up, dy, rows in zip(self.ups, columns, result.split(self.ranks), strict=True):
            scaled_matmul(up.t(), dy.t(), self.scaling, out=rows)
        return result


class InputOp:
    """Step before a product, here the identity. `forward` takes x (N, in) and also returns what `backward` needs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return z and what `backward` needs."""
        return x, x

    def backward(self, dz: Tensor, x: Tensor, saved: Tensor) -> Tensor:
        """Return the gradient of x, given that of z and what `forward` returned beside it."""
        return dz


class Norm(InputOp):
    """RMSNorm (arXiv 1910.07467): z = w * x / sqrt(mean(x^2) + eps), in float32, rounded once."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return z (N, in) and 1 / sqrt(mean(x^2) + eps) (N, 1)."""
        wide = at_least_float32(x)
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(self.eps).rsqrt_()  # (N, 1)
        return (wide * scale).mul_(self.weight).to(x.dtype), scale

    def backward(self, dz: Tensor, x: Tensor, saved: Tensor) -> Tensor:
        """dx = scale * (g - x * scale^2 * mean(g * x)) with g = w * dz."""
        wide, weighted = at_least_float32(x), dz * at_least_float32(self.weight)
        mean = torch.linalg.vecdot(weighted, wide).div_(x.shape[-1]).unsqueeze(-1)
        return weighted.addcmul_(wide, mean.mul_(saved).mul_(saved), value=-1).mul_(saved).to(x.dtype)


class SwiGLU(InputOp):
    """SwiGLU (arXiv 2002.05202): z = silu(g) * u of x = [g, u]."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return z, half as wide as x, and silu(g)."""
        gate, up = x.chunk(2, -1)
        activated = F.silu(gate)
        return activated * up, activated

    def backward(self, dz: Tensor, x: Tensor, saved: Tensor) -> Tensor:
        """Return the gradients of g and u side by side, as x holds them."""
        gate, up = x.chunk(2, -1)
        dx = torch.empty_like(x)
        to_gate, to_up = dx.chunk(2, -1)
        torch.mul(dz, saved, out=to_up)
        torch.ops.aten.silu_backward.grad_input(dz * up, gate, grad_input=to_gate)
        return dx


class Rotary(NamedTuple):
    """Rotary embedding (arXiv 2104.09864) of the first `heads` heads of each token, after a product.

    Pairs (x_j, x_{j + D/2}) turn by angles. `cos` (1 or B, T, D) has their cosines twice, `sin` their negated sines and
    then their sines.
    """

    cos: Tensor
    sin: Tensor
    heads: int

    def forward(self, y: Tensor) -> tuple[Tensor, ...]:
        """Change y (B, T, out) in place; return what `backward` needs."""
        self.rotate_(y)
        return ()

    def backward(self, dy: Tensor) -> Tensor:
        """Return the gradient of y before the embedding: dy, turned back."""
        return self.rotate_(dy.clone(memory_format=torch.contiguous_format), back=True)

    def rotate_(self, y: Tensor, back: bool = False) -> Tensor:
        """Turn y (B, T, out) in place, forward or back; return it."""
        (cos, _), (_, sin) = (table.unsqueeze(2).chunk(2, -1) for table in (self.cos, self.sin))
        first, second = heads_of(y, self.cos.shape[-1])[:, :, : self.heads].chunk(2, -1)
        sign = -1 if back else 1
        turned = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-sign)
        second.mul_(cos).add_(turned, alpha=sign)
        return y


class HeadNorm(NamedTuple):
    """RMSNorm of each of the rotary's heads by itself, with weights (heads, D), and then the rotary embedding."""

    norm: Norm
    rotary: Rotary

    def forward(self, y: Tensor) -> tuple[Tensor, ...]:
        """Change y (B, T, out) in place; return the norm's input."""
        heads = self._heads(y)
        before = heads.clone()
        heads.copy_(self.norm.forward(before)[0])
        self.rotary.rotate_(y)
        return (before,)

    def backward(self, dy: Tensor, before: Tensor) -> Tensor:
        """Return the gradient of y before the norm, whose input was `before`."""
        dy = self.rotary.backward(dy)
        heads = self._heads(dy)
        heads.copy_(self.norm.backward(heads, before, self.norm.forward(before)[1]))
        return dy

    def _heads(self, y: Tensor) -> Tensor:
        """Return the heads (B, T, heads, D) of y that the norm changes."""
        return heads_of(y, self.rotary.cos.shape[-1])[:, :, : self.rotary.heads]


OutputOp = Rotary | HeadNorm


def heads_of(x: Tensor, head_dim: int) -> Tensor:
    """Return x (B, T, heads * head_dim) as (B, T, heads, head_dim)."""
    return x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)


class LinearGroup(NamedTuple):
    """The products of one group of linear layers, and what comes before and after them."""

    parts: Sequence[AdaptedLinear]
    low_rank: LowRank | None  # their adapters; None if they have none
    merged: Tensor | None  # (sum of out, in)
    before: InputOp
    after: OutputOp | None

    @property
    def sizes(self) -> list[int]:
        """Return the number of outputs of each layer."""
        return [part.layer.out_features for part in self.parts]

    def computed(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the result (B, T, sum of out) for x (B, T, in), and what the step after the product saves."""
        z, _ = self.before.forward(x.reshape(-1, x.shape[-1]))
        y = self.forward(z)
        y = y.view(*x.shape[:-1], y.shape[-1])
        saved = self.after.forward(y) if self.after else ()
        return y if residual is None else y.add_(residual), saved

    def forward(self, z: Tensor) -> Tensor:
        """Return y (N, sum of out) for z (N, in)."""
        y = matmul(z, self.merged.t()) if self.merged is not None else z.new_empty(len(z), sum(self.sizes))
        columns = y.split(self.sizes, 1)
        if self.merged is None:
            for part, own in zip(self.parts, columns, strict=True):
                matmul(z, part.weight(z.dtype).t(), out=own)
            if self.low_rank:
                lows, ups = self.low_rank.project(z), self.low_rank.ups
                for own, low, up in zip(self._adapted(columns), lows, ups, strict=True):
                    own.addmm_(low.t(), up.t())
        for part, own in zip(self.parts, columns, strict=True):
            if part.layer.bias is not None:
                own.add_(part.layer.bias)
        return y

    def backward(
        self, dy: Tensor, z: Tensor, needs_input: bool, needs_adapters: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return dz (N, in), and the gradients of A and B of each part that has them, if `needs_adapters`."""
        columns = dy.split(self.sizes, 1)
        dz = None
        if needs_input and self.merged is not None:
            dz = matmul(dy, self.merged)
        elif needs_input:
            dz = matmul(columns[0], self.parts[0].weight(dy.dtype))
            for part, own in list(zip(self.parts, columns, strict=True))[1:]:
                dz.addmm_(own, part.weight(own.dtype))
        adapters, adapted = self.low_rank, self._adapted(columns)
        if adapters is None:
            return dz, []
        low_gradients = adapters.gradients(adapted)
        if dz is not None and self.merged is None:
            dz.addmm_(low_gradients.t(), adapters.down)
        gradients: list[Tensor] = []
        if needs_adapters:
            to_a = matmul_to(adapters.stored, low_gradients, z).split(adapters.ranks)
            for da, low, own in zip(to_a, adapters.project(z), adapted, strict=True):
                gradients += [da, matmul_to(adapters.stored, low, own).t()]
        return dz, gradients

    def _adapted(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Return the columns of those parts that have an adapter."""
        return [own for part, own in zip(self.parts, columns, strict=True) if part.adapter]


class FusedLinear(torch.autograd.Function):
    """A product as one node: (x (B, T, in), group, residual (B, T, out), A and B of each adapter) -> (B, T, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: LinearGroup, residual: Tensor | None, *adapters: Tensor) -> Tensor:
        """Return the product, and save what `backward` needs."""
        ctx.group = group
        y, saved = group.computed(x, residual)
        ctx.save_for_backward(x, *saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, of the residual, and of A and B of each adapter."""
        (x, *after), group, (dy,) = ctx.saved_tensors, ctx.group, gradients
        needs_input, _, needs_residual, *needs_adapters = ctx.needs_input_grad
        to_residual = dy if needs_residual else None
        if group.after is not None:
            dy = group.after.backward(dy, *after)
        rows, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        z, saved = group.before.forward(rows)
        dz, to_adapters = group.backward(dy, z, needs_input, any(needs_adapters))
        dx = None if dz is None else group.before.backward(dz, rows, saved).view(x.shape)
        return dx, None, to_residual, *(to_adapters or [None] * len(needs_adapters))
