"""The check that a vLLM server serves the policy that is trained."""

from collections.abc import Callable

import torch

from rlhf.data.batch import Rollout
from rlhf.errors import UserError
from rlhf.models.shared_base import SharedBase
from rlhf.observe.watch import mismatch_limit
from rlhf.recipe import Recipe
from rlhf.recipe.schema_online import OnlineOptions
from rlhf.stages.online import role_passes

ROWS = 8  # responses that are compared


@torch.no_grad()
def check_served(
    shared: SharedBase, rollout: Rollout, recipe: Recipe, options: OnlineOptions, command: Callable[[], str]
) -> None:
    """Compare log-probabilities of a few sampled responses with those of the training forward pass.

    Raises UserError where they differ by more than the precision explains: the server has another base, dtype or
    adapter, or does not give processed log-probabilities.
    """
    assert rollout.logprobs is not None
    few = rollout.rows(torch.arange(min(ROWS, len(rollout.ids)), device=rollout.ids.device))
    own = role_passes.logprobs(shared, "policy", few, options)
    difference = role_passes.sampling_mismatch(few, own)["rollout/logprob_diff_avg"].item()
    limit = mismatch_limit(recipe.model, served=True)
    if not difference <= limit:
        raise UserError(
            f"the vLLM server at {options.vllm_url} does not serve the policy: log-probabilities of "
            f"{int(few.mask.sum())} tokens differ by {difference:.2g} nats on average, more than {limit}; start it "
            f"with: `{command()}`"
        )
