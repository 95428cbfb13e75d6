"""Every type of model that is tested: what the engine samples and trains on is what transformers computes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, PreTrainedModel

from rlhf.data.batch import Rollout, collate
from rlhf.models.precision import Model
from rlhf.models.shared_base import SharedBase
from rlhf.models.support import check_model
from rlhf.models.traits import has_fused_experts, sliding_window
from rlhf.recipe.model_types import TESTED
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from tests import models

VOCABULARY, PAD, EOS = 64, 0, 5
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
NEW_TOKENS = 24  # with the longest prompt far beyond the windows of 16 tokens


class Ids:
    """The special tokens that sampling needs of a tokenizer."""

    pad_id, eos_id = PAD, EOS


@pytest.fixture(scope="module", params=models.KINDS)
def model(request) -> PreTrainedModel:
    made: PreTrainedModel = models.model(request.param, VOCABULARY)
    return made.requires_grad_(False)


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(6, VOCABULARY, (count,), generator=draw).tolist() for count in (3, 9, 20, 7)]


def drawn(model: PreTrainedModel, temperature: float = 1.0) -> Rollout:
    torch.manual_seed(0)
    return sample(model, prompts(), Ids(), Sampling(32, NEW_TOKENS, temperature, batch_size=4))


def own_logprobs(model: Model, rollout: Rollout) -> torch.Tensor:
    """Log-probabilities (B, R) of the response tokens by the model's own forward pass."""
    logp = model(input_ids=rollout.ids, use_cache=False).logits.float().log_softmax(-1)
    of_tokens = logp[:, :-1].gather(2, rollout.ids[:, 1:, None]).squeeze(2)
    chosen: torch.Tensor = of_tokens.gather(1, rollout.predictors.clamp(max=of_tokens.shape[1] - 1))
    return chosen * rollout.mask


def test_all_types_are_here():
    assert set(TESTED) == set(models.KINDS)


def test_greedy_tokens_are_those_of_generate(model):
    """One prompt at a time there, all together here, so that short prompts have padding before them."""
    settings = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=EOS, pad_token_id=PAD)
    expected = []
    for row in prompts():
        ids = torch.tensor([row])
        new = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        expected.append(new[0, len(row) :].tolist())
    rollout = drawn(model, temperature=0.0)
    assert [row[mask].tolist() for row, mask in zip(rollout.tokens, rollout.mask, strict=True)] == expected


def test_log_probabilities_of_sampling_are_those_of_the_models_forward_pass(model):
    rollout = drawn(model)
    assert rollout.logprobs is not None
    window = sliding_window(model.config)
    assert window is None or int(rollout.last.max()) > window, "windows are shorter than what is sampled"
    expected = own_logprobs(model, rollout)
    torch.testing.assert_close(rollout.logprobs * rollout.mask, expected, atol=2e-5, rtol=1e-4)


def test_training_sees_the_same_log_probabilities_and_gradients(model, tmp_path):
    """`SharedBase` computes them from hidden states in chunks; here with an adapter on all linear layers."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        targets = ATTENTION if has_fused_experts(model) else "all-linear"
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets))
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    plain: Any = adapted.unload()
    shared = SharedBase(plain, {"policy": tmp_path}, trainable=("policy",))
    rollout = replace(drawn(plain), logprobs=None)
    expected = own_logprobs(shared.peft, rollout)
    weights = shared.roles.parameters("policy")
    wanted = torch.autograd.grad(expected.sum(), weights)
    with shared.role("policy"):
        logprobs = shared.logprobs(shared.response_hidden(rollout), rollout, 1.0)
        gradients = torch.autograd.grad(logprobs.sum(), weights)
    torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=1e-4)
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, atol=2e-4 * float(other.abs().max()) + 1e-6, rtol=1e-3)
    tuner: Any = shared.peft
    tuner.unload()


def test_padding_behind_a_row_changes_nothing(model):
    rows = [collate([prompt], [[7, 8, 9]], PAD, EOS) for prompt in prompts()]
    together = collate(prompts(), [[7, 8, 9]] * 4, PAD, EOS)
    for row, expected in zip(rows, own_logprobs(model, together), strict=True):
        torch.testing.assert_close(own_logprobs(model, row)[0], expected, atol=2e-5, rtol=1e-4)


def test_the_parts_are_the_whole(model):
    check_model(model, "a model")
