"""A comparison of sampling with the model's own forward pass, for types of models that no test covers."""

import torch

from rlhf.data.tokenize import SpecialIds
from rlhf.errors import UserError
from rlhf.models.precision import Model, dtype_of, mixed_precision
from rlhf.models.traits import sliding_window
from rlhf.recipe.model_types import TESTED
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from rlhf.terminal import message_of

NEW_TOKENS = 8
WIDEST = 64  # a sliding window beyond this many tokens is not tried
# Differences of log-probabilities, far above rounding and far below those of another distribution.
BOUND = {torch.float32: 0.01, torch.bfloat16: 0.5}


@torch.no_grad()
def check_sampling(model: Model, tokenizer: SpecialIds) -> None:
    """Sample a few tokens to padded prompts, and compare their log-probabilities with a forward pass over the whole.

    Raises UserError where they differ, or where the model cannot be sampled from. Random numbers drawn later are the
    same as without this. Types in `TESTED` are not compared, nor is anything on the device meta.
    """
    kind, dtype = model.config.model_type, dtype_of(model)
    if kind in TESTED or model.device.type == "meta":
        return
    window = sliding_window(model.config) or 0
    longest = window + 3 if 0 < window <= WIDEST else 9
    vocabulary = len(model.get_output_embeddings().weight)
    prompts = [[(7 * place + 3) % vocabulary for place in range(length)] for length in (2, 5, longest)]
    sampling = Sampling(longest, NEW_TOKENS, 1.0, batch_size=len(prompts))
    try:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            rollout = sample(model, prompts, tokenizer, sampling)
        with mixed_precision(model):
            logits = model(input_ids=rollout.ids, use_cache=False).logits
    except Exception as error:  # whatever a model's code raises
        raise UserError(f"{kind} models cannot be sampled from here: {message_of(error)}") from error
    logp = logits.float().log_softmax(-1)[:, :-1].gather(2, rollout.ids[:, 1:, None]).squeeze(2)
    expected = logp.gather(1, rollout.predictors.clamp(max=logp.shape[1] - 1))
    assert rollout.logprobs is not None
    difference = float(((rollout.logprobs - expected) * rollout.mask).abs().max())
    if not difference <= BOUND.get(dtype, BOUND[torch.bfloat16]):  # NaN fails too
        raise UserError(
            f"{kind} models are not supported: log-probabilities of sampling differ from the model's own by "
            f"{difference:.2g}"
        )
