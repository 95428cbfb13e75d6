"""Likelihood of given texts under a model: perplexity."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel

from rlhf.data.tokenize import Encoded, pad_right
from rlhf.models.output_layer import LOGITS, is_plain, logits_of
from rlhf.models.precision import Model, mixed_precision
from rlhf.models.traits import logit_scale


@torch.no_grad()
def perplexity(model: Model, rows: Sequence[Encoded], pad_id: int, batch_size: int) -> float:
    """Return exp of the mean negative log-likelihood per token of the responses, over those of all rows alike.

    The first token of a row without a prompt is not scored: nothing predicts it. Batches are sorted by length and do
    not change the result; the Trainer's own eval loss is a mean of batch means, which batches do change.
    Raises ValueError where no token is scored.
    """
    model.eval()
    device = next(model.parameters()).device
    by_length, total, count = sorted(rows, key=lambda row: len(row.ids)), 0.0, 0
    for start in range(0, len(by_length), batch_size):
        batch = by_length[start : start + batch_size]
        ids = pad_right([row.ids for row in batch], pad_id).to(device)
        scored = torch.zeros_like(ids, dtype=torch.bool)
        for number, row in enumerate(batch):
            scored[number, max(len(row.prompt), 1) : len(row.ids)] = True
        losses = _losses(model, ids, scored)
        total += losses.double().sum().item()
        count += losses.numel()
    if not count:
        raise ValueError("perplexity needs at least one token to score")
    return float(torch.tensor(total / count).exp())


def _losses(model: Model, ids: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """Return the losses of the tokens of `ids` (B, T) that are `scored` (B, T), row after row.

    The logits of all tokens would be the largest tensors of whole stages. The model's output layer therefore hands its
    input over, of which logits are made at scored tokens only and a chunk at a time, and then sees one token. The model
    runs as a whole: an engine that divides its weights collects them as it runs.
    """
    layer, losses = model.get_output_embeddings(), []
    scale, chunk = logit_scale(model.config), max(1, LOGITS // layer.weight.shape[0])
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if not is_plain(base):  # its own code makes logits of states
        with mixed_precision(model):
            hidden = base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][scored[:, 1:]]
            parts = zip(hidden.split(chunk), ids[:, 1:][scored[:, 1:]].split(chunk), strict=True)
            own = [F.cross_entropy(logits_of(base, part), targets, reduction="none") for part, targets in parts]
        return torch.cat(own)

    def hand_over(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        states, tokens = inputs[0][:, :-1][scored[:, 1:]], ids[:, 1:][scored[:, 1:]]
        for part, targets in zip(states.split(chunk), tokens.split(chunk), strict=True):
            logits = layer.forward(part).float()
            logits = logits if scale == 1.0 else logits * scale
            losses.append(F.cross_entropy(logits, targets, reduction="none"))
        return (inputs[0][:1, :1],)

    hook = layer.register_forward_pre_hook(hand_over)
    try:
        with mixed_precision(model):
            model(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    return torch.cat(losses)
