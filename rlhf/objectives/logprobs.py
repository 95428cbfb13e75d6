"""Log-probabilities of sampled tokens, and entropies, from logits or hidden states."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf.objectives.masked import at_least_float32

Matmul = Callable[[Tensor, Tensor], Tensor]
EntropyMode = Literal["none", "value", "gradient"]  # whether it is computed, and differentiated


class TokenStatistics(NamedTuple):
    """Of each token: its log-probability, the entropy of its distribution, and whether it is the likeliest one.

    The last two are None if they were not asked for.
    """

    logp: Tensor
    entropy: Tensor | None
    likeliest: Tensor | None


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    chunk: int = 4096,
    entropy: EntropyMode = "none",
    matmul: Matmul = torch.mm,
    likeliest: bool = False,
    to_logits: Matmul | None = None,
) -> TokenStatistics:
    """Return log p(id) = logit[id] - logsumexp(logits), logits = hidden @ weight.T / temperature, chunk by chunk.

    The log-softmax is taken in float32 or wider: in bfloat16 the result would have two or three digits, and a policy
    ratio exp(new - old) would be mostly rounding.

    With d log p(id) / d hidden = (weight[id] - sum_v p_v weight[v]) / temperature, the forward pass can compute the
    gradient while a chunk's logits exist and keep (N, H) of it: no logits are stored for the backward pass and none
    are computed twice. `entropy` adds the entropy of each distribution in nats: "value" computes it without a gradient,
    "gradient" keeps one in the same way, for another product of the chunk with `weight`. `likeliest` adds whether no
    token is likelier. `matmul` multiplies matrices; `to_logits` makes the logits in its place, and may return them in
    another type than its inputs have, so that they are not rounded to 16 bits.

    Shapes: hidden (N, H); weight (V, H), which gets no gradient; ids (N,) int64. Returns (N,) tensors, two in float32
    or wider and one of bool. At most `chunk` x V logits exist at a time, in two or three copies.
    Raises ValueError when the shapes do not fit or `weight` requires a gradient.
    """
    if hidden.dim() != 2 or ids.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and ids {tuple(ids.shape)} do not fit: "
            "want (N, H), (V, H) and (N,)"
        )
    if weight.requires_grad:
        raise ValueError("the output matrix must be frozen: it would get no gradient from here")
    apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _LinearLogprobs.apply
    products = matmul, to_logits or matmul
    logp, entropies, tops = apply(hidden, weight, ids, temperature, chunk, entropy, products, likeliest)
    return TokenStatistics(logp, None if entropy == "none" else entropies, tops if likeliest else None)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        chunk: int,
        entropy: EntropyMode,
        products: tuple[Matmul, Matmul],
        likeliest: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        matmul, to_logits = products
        need_grad = ctx.needs_input_grad[0]
        logp_slopes, entropy_slopes = [], []  # gradients with respect to hidden
        logps, entropies, tops = [], [], []
        for states, tokens in zip(hidden.split(chunk), ids.split(chunk), strict=True):
            logits = at_least_float32(to_logits(states, weight.T))
            if temperature != 1.0:
                logits = logits / temperature
            picked = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
            normaliser = logits.logsumexp(1)
            logps.append(picked - normaliser)
            if likeliest:
                tops.append(picked >= logits.amax(1))
            if not need_grad and entropy == "none":
                continue
            logp = logits.sub_(normaliser.unsqueeze(1))
            p = logp.exp()
            if entropy != "none":
                # p log p tends to 0 where p is 0; a finite log p keeps 0 * -inf out
                weighted = logp.clamp_(min=torch.finfo(logp.dtype).min).mul_(p)
                entropies.append(-weighted.sum(1))
                if need_grad and entropy == "gradient":
                    slope = weighted.addcmul_(p, entropies[-1].unsqueeze(1)).neg_()
                    entropy_slopes.append(matmul(slope.to(weight.dtype), weight) / temperature)
            if need_grad:
                # 1 - p is formed in float32: rounded after the difference, it survives where the policy is confident
                slope = p.neg_().scatter_add_(1, tokens.unsqueeze(1), torch.ones_like(picked).unsqueeze(1))
                logp_slopes.append(matmul(slope.to(weight.dtype), weight) / temperature)
        if need_grad:
            ctx.save_for_backward(*(torch.cat(parts) for parts in (logp_slopes, entropy_slopes) if parts))
        logp = torch.cat(logps)
        entropy_values = torch.cat(entropies) if entropies else logp.new_zeros(0)
        is_top = torch.cat(tops) if tops else logp.new_zeros(0, dtype=torch.bool)
        ctx.mark_non_differentiable(is_top, *([] if entropy == "gradient" else [entropy_values]))
        return logp, entropy_values, is_top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        terms = [grad.unsqueeze(1) * slope for grad, slope in zip(grads, ctx.saved_tensors, strict=False)]
        return sum(terms).to(ctx.saved_tensors[0].dtype), *([None] * 7)
