"""Every type of causal language model: what is sampled, trained, and computed by transformers is one thing."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rlhf.data.batch import Rollout
from rlhf.errors import UserError
from rlhf.models.adapters import lora_config
from rlhf.models.classifier import add_classifier
from rlhf.models.shared_base import SharedBase
from rlhf.recipe.schema_model import Lora
from rlhf.rollout.check import check_first
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from tests import models

FEW = ("llama", "gemma2", "qwen3_5_text")  # one of the table, one of soft caps and windows, one that recurs
EVERY = [*models.KINDS, *models.OTHER_KINDS]
KINDS = [pytest.param(kind, marks=() if kind in FEW else pytest.mark.slow) for kind in EVERY]
VOCABULARY, ROOM = 50, 12
PROMPTS = [[7, 8, 9], [11], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [30, 31, 32, 33]]
LORA = Lora(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear")


class Ids:
    pad_id, eos_id = 0, 1


def shared_base(kind: str) -> SharedBase:
    """A tiny model with a policy whose adapter does something."""
    base = models.model(kind, VOCABULARY).requires_grad_(False)
    torch.manual_seed(1)
    config: LoraConfig = lora_config(LORA, base, "CAUSAL_LM")
    shared = SharedBase(base, {"policy": config}, trainable=("policy",))
    for name, weight in shared.peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    return shared


def drawn(shared: SharedBase, sampling: Sampling, prompts: list[list[int]] = PROMPTS) -> Rollout:
    torch.manual_seed(2)
    return sample(shared.base, prompts, Ids(), sampling)


def own_logprobs(shared: SharedBase, rollout: Rollout, temperature: float) -> Tensor:
    """Of the response tokens, by the model's own forward pass over whole rows."""
    logits: Tensor = shared.base(input_ids=rollout.ids, use_cache=False).logits[:, :-1].float() / temperature
    own: Tensor = logits.log_softmax(-1).gather(2, rollout.ids[:, 1:, None]).squeeze(2).gather(1, rollout.predictors)
    return own


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_tokens_have_the_log_probabilities_that_are_trained(kind, capsys):
    """Of prompts of several lengths, with their gradient; the check of a first rollout passes, and says so once."""
    shared, sampling = shared_base(kind), Sampling(32, ROOM, 0.7, batch_size=4)
    with shared.role("policy"):
        rollout = drawn(shared, sampling)
        for _ in range(2):
            check_first(shared, rollout, sampling)
        mask, results = rollout.mask, []
        for logp in (
            lambda: shared.logprobs(shared.response_hidden(rollout), rollout, 0.7),
            lambda: own_logprobs(shared, rollout, 0.7),
        ):
            shared.peft.zero_grad()
            values = logp()[mask]
            values.sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in shared.roles.parameters("policy") if p.grad is not None])
            results.append((values.detach(), gradient))
    assert capsys.readouterr().err.count("sampling and training agree") == 1
    (found, slope), (expected, own_slope) = results
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert own_slope.norm() > 0 and (slope - own_slope).norm() < 1e-3 * own_slope.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_generate(kind):
    """Each prompt by itself there, together here."""
    shared = shared_base(kind)
    with shared.role("policy"):
        rollout = drawn(shared, Sampling(32, ROOM, 0.0, batch_size=4))
        for prompt, response in zip(PROMPTS, rollout.response_ids, strict=True):
            options: dict[str, Any] = {"max_new_tokens": ROOM, "do_sample": False, "eos_token_id": 1, "pad_token_id": 0}
            run: Any = shared.base.generate
            alone = run(torch.tensor([prompt]), **options)[0, len(prompt) :]
            assert response == alone.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_a_classifier_with_the_same_weights(kind):
    """A role's states at the last token, under the head, in rows with padding at the right."""
    shared = shared_base(kind)
    config = shared.base.config
    config.num_labels = 1
    add_classifier(config)
    classifier: Any = AutoModelForSequenceClassification.from_config(config).eval()
    inner = {name: x for name, x in shared.base.get_decoder().state_dict().items() if ".lora_" not in name}
    inner = {name.replace(".base_layer.", "."): x for name, x in inner.items()}
    getattr(classifier, classifier.base_model_prefix).load_state_dict(inner)
    shared.score_heads["reward"] = classifier.score
    shared.roles._bare.add("reward")
    ids = torch.tensor([[7, 8, 9, 0, 0], [11, 12, 13, 14, 15]])
    with torch.no_grad():
        alone = [classifier(input_ids=row[None]).logits.item() for row in (ids[0, :3], ids[1])]
    scores = shared.scores_at(ids, torch.tensor([2, 4]))
    torch.testing.assert_close(scores, torch.tensor(alone), atol=2e-5, rtol=1e-4)


def test_a_pass_that_differs_from_sampling_ends_the_stage():
    shared, sampling = shared_base("gemma2"), Sampling(32, ROOM, 1.0, batch_size=4)
    with shared.role("policy"):
        rollout = drawn(shared, sampling)
        assert rollout.logprobs is not None
        rollout.logprobs[1, 0] += 1e-2
        with pytest.raises(UserError, match=r"gemma2 .* differ by 0\.01"):
            check_first(shared, rollout, sampling)
    assert not shared.checked
