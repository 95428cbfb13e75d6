"""How likely a model finds given texts: perplexity, and log-probabilities of whole sequences."""

from collections.abc import Iterator, Sequence

import torch

from rlhf.data.tokenize import pad_right
from rlhf.models.loading import mixed_precision
from rlhf.models.model import Model


@torch.no_grad()
def perplexity(model: Model, sequences: Sequence[tuple[list[int], int]], pad_id: int, batch_size: int) -> float:
    """exp of the mean negative log-likelihood per scored token, over all tokens alike.

    `sequences`: (ids, how many tokens at the start are not scored). Batches are sorted by length and do not change the
    result; the Trainer's own eval loss is a mean of batch means, which does.
    """
    total, count = 0.0, 0
    for _, losses, _ in _token_losses(model, sequences, pad_id, batch_size):
        total += losses.double().sum().item()
        count += losses.numel()
    return float(torch.tensor(total / count).exp())


@torch.no_grad()
def sequence_logprobs(
    model: Model, sequences: Sequence[tuple[list[int], int]], pad_id: int, batch_size: int
) -> torch.Tensor:
    """Sum of the log-probabilities of each sequence's scored tokens in nats: (N,) float64 on the CPU, in their order.

    `sequences` as for `perplexity`.
    """
    found = torch.zeros(len(sequences), dtype=torch.float64)
    for rows, losses, scored in _token_losses(model, sequences, pad_id, batch_size):
        owner = torch.tensor(rows).repeat_interleave(scored.sum(1).cpu())
        found.index_add_(0, owner, -losses.double().cpu())
    return found


def _token_losses(
    model: Model, sequences: Sequence[tuple[list[int], int]], pad_id: int, batch_size: int
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """For each batch its indices in `sequences`, the negative log-likelihoods of its scored tokens, row after row, and
    the mask (B, T) of these tokens. Batches are made by length."""
    model.eval()
    device = next(model.parameters()).device
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i][0]))
    for at in range(0, len(order), batch_size):
        rows = order[at : at + batch_size]
        ids = pad_right([sequences[i][0] for i in rows], pad_id).to(device)
        scored = torch.zeros_like(ids, dtype=torch.bool)
        for row, i in enumerate(rows):
            sequence, skipped = sequences[i]
            scored[row, max(skipped, 1) : len(sequence)] = True
        with mixed_precision(model):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1][scored[:, 1:]].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:][scored[:, 1:]], reduction="none")
        yield rows, losses, scored
