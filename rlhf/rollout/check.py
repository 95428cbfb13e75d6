"""One check of every model, in its first rollout: sampling and training compute the same log-probabilities."""

import torch

from rlhf.data.batch import Rollout
from rlhf.errors import UserError
from rlhf.models.precision import dtype_of
from rlhf.models.shared_base import SharedBase
from rlhf.rollout.decoding import Sampling
from rlhf.terminal import say

ROWS = 4  # of the rollout, its first ones
# Nats: far above rounding, which grows with the depth of a model (4.2e-5 in 30 layers of float32, more in recurrent
# ones and in 16 bits), and far below another distribution.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.5}


@torch.no_grad()
def check_first(shared: SharedBase, rollout: Rollout, sampling: Sampling) -> None:
    """Compare the log-probabilities that the active role sampled with a pass, and say by how much they differ.

    Does nothing in later rollouts, with `top_p` below 1, and on the device meta. Raises UserError above `LIMITS`.
    """
    if shared.checked or sampling.top_p < 1 or shared.device.type == "meta" or rollout.logprobs is None:
        return
    rows = rollout.rows(torch.arange(min(ROWS, len(rollout.ids))))
    assert rows.logprobs is not None
    temperature, limit = sampling.temperature or 1.0, LIMITS[dtype_of(shared.base)]
    passed = shared.logprobs(shared.response_hidden(rows), rows, temperature)
    difference = float(((rows.logprobs - passed) * rows.mask).abs().max())
    kind = shared.base.config.model_type
    if not difference <= limit:  # NaN is not
        raise UserError(
            f"{kind} models cannot be trained here: log-probabilities of sampled tokens differ by {difference:.2g} "
            f"from those of a forward pass, and may by {limit:.2g}: use hardware.trunk: library, or another model"
        )
    say(f"sampling and training agree: log-probabilities of a first rollout differ by at most {difference:.1g}")
    shared.checked = True
