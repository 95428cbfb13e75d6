"""Types of models outside the tested ones: what agrees with the engine passes, the rest is refused in one line."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.models.adapters import _targets
from rlhf.models.architecture import config_of
from rlhf.models.support import check_lengths, check_model, unsupported
from rlhf.plan.rehearsal.short_runs import check_equal_layers, check_windows, rehearsal_changes
from rlhf.recipe.model_types import TESTED
from rlhf.recipe.schema_model import Architecture
from rlhf.rollout.probe import check_sampling
from tests import models
from tests.helpers import RECIPE

VOCABULARY = 64
SIZES: dict[str, Any] = models.SIZES | {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
OTHERS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 8},
    "starcoder2": {"sliding_window": 16},
    "mixtral": EXPERTS | {"sliding_window": 16},
    "deepseek_v3": EXPERTS | LATENT | {"num_key_value_heads": 4},
    "gpt_neox": {},
}


class Ids:
    """The special tokens that sampling needs of a tokenizer."""

    pad_id, eos_id = 0, 5


def other(kind: str, **keys: Any) -> Any:
    """A tiny model of a type, with the keys that its configuration has."""
    known = set(AutoConfig.for_model(kind).to_dict()) | {"head_dim", "vocab_size", "pad_token_id"}
    config = AutoConfig.for_model(kind, **{key: value for key, value in (SIZES | keys).items() if key in known})
    assert unsupported(config) is None
    torch.manual_seed(0)
    made: Any = AutoModelForCausalLM.from_config(config)
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return made.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_type_that_agrees_is_accepted_and_draws_no_random_numbers(kind):
    model = other(kind, **OTHERS[kind])
    check_model(model, kind)
    before = torch.get_rng_state()
    check_sampling(model, Ids())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        (
            "gpt_neo",
            {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 16},
            "gpt_neo models are not supported: log-probabilities of sampling differ",
        ),
        ("rwkv", {"attention_hidden_size": 32, "context_length": 64}, "rwkv models "),
        ("bloom", {"n_layer": 4, "n_head": 4}, "bloom models cannot be sampled from here: "),
    ],
)
def test_a_type_that_does_not_is_refused_in_one_line(kind, keys, message):
    assert kind not in TESTED
    with pytest.raises(UserError, match=message) as error:
        check_sampling(other(kind, **keys), Ids())
    assert "\n" not in str(error.value)


def test_a_rope_that_depends_on_the_length_of_a_batch_has_a_limit():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = config_of(Architecture.model_validate(models.architecture("llama", rope_parameters=rope)))
    check_lengths(config, {"sft.max_length": 512}, "a model")
    with pytest.raises(UserError, match=r"a rope of type dynamic a sequence may have 512 tokens, .* admits 600"):
        check_lengths(config, {"sft.max_length": 600}, "a model")
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    keys: dict[str, Any] = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **factors}}
    keys["original_max_position_embeddings"] = 64
    config = config_of(Architecture.model_validate(models.architecture("phi3", **keys)))
    check_lengths(config, {"sft.max_length": 64}, "a model")
    with pytest.raises(UserError, match=r"a rope of type longrope a sequence may have 64 tokens, .* admits 65"):
        check_lengths(config, {"sft.max_length": 65}, "a model")


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_stay_frozen(kind):
    """Where they share a tensor, peft gives them adapters of another form for a target with a layer's name."""
    keys = models.KINDS[kind] if kind in models.KINDS else OTHERS[kind]
    base = other(kind, **keys)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=_targets(base, "all-linear")))
    config: Any = adapted.peft_config["default"]
    assert not config.target_parameters
    names = [name for name, module in adapted.named_modules() if isinstance(module, LoraLayer)]
    assert names and all("self_attn" in name for name in names)
    with pytest.raises(UserError, match="gate_proj is also the name of an expert's layer"):
        _targets(other(kind, **keys), ["o_proj", "gate_proj"])


def test_layers_that_differ_are_not_taken_for_the_first_ones():
    check_equal_layers(other("deepseek_v3", **OTHERS["deepseek_v3"]).config)  # one dense layer before the others
    with pytest.raises(UserError, match=r"deepseek_v3 models is not predicted where layers differ \(1 and 3\)"):
        check_equal_layers(other("deepseek_v3", **OTHERS["deepseek_v3"] | {"first_k_dense_replace": 3}).config)


S, F = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("kinds", "predicted"),
    [
        ([S] * 12, True),
        ([F] * 12, True),
        ([S, F] * 6, True),
        (([S] * 5 + [F]) * 4, True),
        (([S] * 3 + [F]) * 16, True),
        (([F] + [S] * 3) * 16, True),
        (([S] + [F] * 3) * 3, True),
        ([F] * 4 + [S] * 8, False),
        ([S] * 4 + [F] * 8, False),
        ([F] * 11 + [S], False),  # its mask is in no rehearsal
        (([F] * 3 + [S]) * 3, False),  # its mask is in the deeper rehearsal alone
        ([F] * 3 + [S], True),  # all of it is rehearsed
    ],
)
def test_sliding_layers_that_come_late_are_not_predicted_from_the_first_ones(kinds, predicted):
    """Rows within the window are attended to alike in every layer."""
    config = AutoConfig.for_model("olmo3", num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=128)
    check_windows(config, 128)
    if predicted:
        check_windows(config, 1024)
    else:
        with pytest.raises(UserError, match=r"do not stand for all .* rows of at most 128 tokens.* which admit 1024"):
            check_windows(config, 1024)


def test_a_recipe_is_refused_for_the_layers_that_its_type_makes():
    """Of a Qwen2 with `max_window_layers` those after the first 4 slide; no pinned recipe is refused."""
    keys: dict[str, Any] = {"model_type": "qwen2", "num_hidden_layers": 12, "sliding_window": 128}
    keys |= {"use_sliding_window": True, "max_window_layers": 4, "vocab_size": 900}
    loaded = recipe.load(RECIPE, {f"model.architecture.{key}": value for key, value in keys.items()})
    assert loaded.recipe.longest() > 128
    with pytest.raises(UserError, match=r"all 12, of which 8 have a sliding window"):
        rehearsal_changes(loaded.recipe, 2)
    pinned = [file.parent for file in RECIPE.parents[1].glob("*/*/predicted.json")]
    assert pinned and all(rehearsal_changes(recipe.load(folder).recipe, 2) for folder in pinned)
