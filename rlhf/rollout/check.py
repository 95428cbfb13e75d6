"""One check of every model and server, in a first rollout: sampling and training compute the same log-probabilities."""

import torch

from rlhf.data.batch import Rollout
from rlhf.errors import UserError
from rlhf.models.precision import dtype_of
from rlhf.models.shared_base import SharedBase
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.vllm import Client
from rlhf.terminal import say

ROWS = 4  # of the rollout, its first ones
# Nats: far above rounding, which grows with the depth of a model (4.2e-5 in 30 layers of float32, more in recurrent
# ones and in 16 bits), and far below another distribution.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.5}


@torch.no_grad()
def check_first(
    shared: SharedBase, rollout: Rollout, sampling: Sampling, server: Client | None = None, limit: float = 0.0
) -> None:
    """Compare the log-probabilities that the active role sampled with a pass, and say by how much they differ.

    Where a `server` sampled for it, its base, dtype or adapter may be others: the mean difference may be up to `limit`.
    Does nothing in later rollouts, with `top_p` below 1, and on the device meta. Raises UserError above `LIMITS`.
    """
    if server in shared.checked or sampling.top_p < 1 or shared.device.type == "meta" or rollout.logprobs is None:
        return
    rows = rollout.rows(torch.arange(min(ROWS, len(rollout.ids))))
    assert rows.logprobs is not None
    passed = shared.logprobs(shared.response_hidden(rows), rows, sampling.temperature or 1.0)
    differences = (rows.logprobs - passed)[rows.mask].abs()
    if server is None:
        difference, limit = differences.max().item(), LIMITS[dtype_of(shared.base)]
        what, way_out = f"{shared.base.config.model_type} models cannot be trained here", "use hardware.trunk: library"
    else:
        difference = differences.mean().item()
        what, way_out = f"the vLLM server at {server.url} does not serve the policy", server.hint()
    if not difference <= limit:  # NaN is not
        raise UserError(
            f"{what}: log-probabilities of sampled tokens differ by {difference:.2g} from those of a forward pass, and "
            f"may by {limit:.2g}: {way_out}"
        )
    say(f"sampling and training agree: log-probabilities of a first rollout differ by {difference:.1g}")
    shared.checked.add(server)
