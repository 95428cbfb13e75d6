"""One check of every model, in its first rollout: sampling and training compute the same log-probabilities."""

import torch

from rlhf.data.batch import Rollout
from rlhf.errors import UserError
from rlhf.models.precision import dtype_of, mixed_precision
from rlhf.models.shared_base import SharedBase
from rlhf.rollout.decoding import Sampling
from rlhf.terminal import say

ROWS = 4  # of the rollout, its first ones
# Nats. Kernels of 16 bits round, most of all in a confident model; another distribution is further away.
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 0.5}
STEPS_AND_PASSES = 1e-3  # the most by which transformers' own steps may differ from its passes, as recurrent layers do


@torch.no_grad()
def check_first(shared: SharedBase, rollout: Rollout, sampling: Sampling) -> None:
    """Compare the log-probabilities that the active role sampled with a pass, and say by how much they differ.

    In float32 they may differ by 2e-5, or where the model's own forward pass differs by more from what was sampled, by
    as much as that, and at most 1e-3. Does nothing in later rollouts, with `top_p` below 1, and on the device meta.
    Raises UserError.
    """
    if shared.checked or sampling.top_p < 1 or shared.device.type == "meta" or rollout.logprobs is None:
        return
    rows = rollout.rows(torch.arange(min(ROWS, len(rollout.ids))))
    assert rows.logprobs is not None
    temperature, limit = sampling.temperature or 1.0, LIMITS[dtype_of(shared.base)]
    passed = shared.logprobs(shared.response_hidden(rows), rows, temperature)
    difference = float(((rows.logprobs - passed) * rows.mask).abs().max())
    if not difference <= limit:  # NaN is not
        limit = max(limit, min(STEPS_AND_PASSES, limit + _own_difference(shared, rows, temperature)))
    kind = shared.base.config.model_type
    if not difference <= limit:
        raise UserError(
            f"{kind} models cannot be trained here: log-probabilities of sampled tokens differ by {difference:.2g} "
            f"from those of a forward pass, and may by {limit:.2g}: use hardware.trunk: library, or another model"
        )
    say(f"sampling and training agree: log-probabilities of a first rollout differ by at most {difference:.1g}")
    shared.checked = True


def _own_difference(shared: SharedBase, rows: Rollout, temperature: float) -> float:
    """Return how far sampled log-probabilities are from those of the model's own forward pass."""
    with mixed_precision(shared.base):
        logits = shared.base(input_ids=rows.ids, use_cache=False).logits
    logp = (logits[:, :-1].float() / temperature).log_softmax(-1).gather(2, rows.ids[:, 1:, None]).squeeze(2)
    own = logp.gather(1, rows.predictors)
    assert rows.logprobs is not None
    return float(((rows.logprobs - own) * rows.mask).abs().max())
