"""examples/ppo_in_one_file.py: three of its steps move policy and critic as those of the product do."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.data.tokenize import DialogueTokenizer
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.recipe.schema_online import Ppo
from rlhf.run.directory import StageRun
from rlhf.stages import ppo
from tests.helpers import not_none, small
from tests.oracle.ppo_learner import NORM, new_learner
from tests.rollouts import varied_rollout

FILE = Path(__file__).parents[2] / "examples/ppo_in_one_file.py"
STEPS = 3


@pytest.fixture(scope="module")
def example() -> Any:
    spec = not_none(importlib.util.spec_from_file_location("ppo_in_one_file", FILE))
    module = importlib.util.module_from_spec(spec)
    not_none(spec.loader).exec_module(module)
    return module


def same_roles(example: Any, learner: ppo.Learner, root: Path) -> Any:
    """The example's roles on the same base, with the product's adapters and heads."""
    lora, shared = small().recipe.lora, learner.shared
    base: Any = load_base(StageRun(root, small(), "ppo").base, torch.device("cpu"))
    model = example.Roles(base, lora.r, lora.lora_alpha)
    ours = dict(shared.peft.named_parameters())
    for name, layer in model.lm.named_modules():
        if isinstance(layer, example.LoraLinear):
            for role in ("policy", "reference", "reward", "value"):
                for part, weights in (("A", layer.a), ("B", layer.b)):
                    weights[role].data.copy_(ours[f"base_model.model.{name}.lora_{part}.{role}.weight"])
    for role, head in (("reward", shared.score_heads["reward"]), ("value", not_none(shared.value_head))):
        model.heads[role].weight.data.copy_(head.weight)
        model.heads[role].bias.data.copy_(0.0 if head.bias is None else head.bias)
    return model


def test_it_takes_the_steps_of_the_product(trained, example):
    settings = example.Settings(kl_coef=0.1, learning_rate=1e-3)
    changes = {
        "value_model": "adapter",
        "missing_eos_penalty": None,
        "kl_coef": settings.kl_coef,
        "kl_estimator": "k1",
        "learning_rate": settings.learning_rate,
        "value_learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_epsilon": 1e-5,
        "weight_decay": 0.0,
        "optim": "adamw_torch",
        "temperature": 1.0,
        "gamma": 1.0,
        "lam": settings.lam,
        "num_ppo_epochs": settings.epochs,
        "num_mini_batches": settings.minibatches,
        "cliprange": settings.cliprange,
        "cliprange_value": settings.cliprange,
        "vf_coef": settings.vf_coef,
        "max_grad_norm": settings.max_grad_norm,
    }
    options = small(**{f"ppo__{key}": value for key, value in changes.items()}).recipe.options(Ppo)
    learner = new_learner(trained, options)
    model = same_roles(example, learner, trained)
    optimizer = example.new_optimizer(model, settings)
    tokenizer: DialogueTokenizer = load_tokenizer(StageRun(trained, small(), "ppo").base)
    for step in range(STEPS):
        rollout = varied_rollout(tokenizer, torch.Generator().manual_seed(step))
        batch = ppo.make_batch(learner, rollout)
        torch.manual_seed(step)
        stats = learner.update(batch)
        learner.advance(batch.kl_per_token)
        theirs = example.make_batch(
            model, example.Rollout(rollout.ids, rollout.prompt_length, rollout.mask), settings, NORM
        )
        for name in ("scores", "old_logp", "ref_logp", "values", "advantages", "returns"):
            torch.testing.assert_close(getattr(theirs, name), getattr(batch, name), rtol=1e-3, atol=2e-5, msg=name)
        torch.manual_seed(step)
        losses = example.update(model, theirs, optimizer, settings)
        assert losses == pytest.approx([stats["loss/policy_avg"], stats["loss/value_avg"]], rel=1e-3, abs=1e-5), step
    for role in ("policy", "value"):
        moved = zip(learner.shared.roles.parameters(role), model.adapter(role), strict=True)
        assert max(float((a - b).abs().max()) for a, b in moved) < 2e-4, role
