"""Architectures: transformers' own configuration, what is read from a config.json, and what is refused."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.errors import UserError
from rlhf.models import decoding_layers
from rlhf.models.architecture import architecture_of, check_architecture, config_of
from rlhf.models.traits import check_lengths, logit_scale
from rlhf.recipe.model_types import RMS_NORMS, TESTED
from rlhf.recipe.schema_model import Architecture
from tests import models


def of(kind: str, **changes: Any) -> Architecture:
    return Architecture.model_validate(models.architecture(kind, vocab_size=64, **changes))


@pytest.mark.parametrize("kind", TESTED)
def test_an_architecture_survives_the_way_through_a_config_json(kind):
    config = config_of(of(kind))
    again = Architecture.model_validate(architecture_of(config))
    assert config_of(again).to_dict() == config.to_dict()
    check_architecture(config, again, "the model")
    assert not {"transformers_version", "dtype", "use_cache"} & again.others().keys(), "keys that no one would write"


@pytest.mark.parametrize(
    ("kind", "given"),
    [(kind, 24) for kind in TESTED]
    + [(kind, None) for kind in TESTED if kind != "ministral"],  # without one transformers does not build it
)
def test_the_width_of_a_head_is_that_of_transformers(kind, given):
    """Some types take a width of their own where `head_dim` is left out, not hidden_size / heads."""
    changes = {} if given is None else {"head_dim": given}
    keys = {key: value for key, value in models.architecture(kind, vocab_size=2**18).items() if key != "head_dim"}
    architecture = Architecture.model_validate(keys | changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(architecture))
    assert model.get_decoder().layers[0].self_attn.head_dim == architecture.head_width


def test_a_key_that_the_type_does_not_have_is_named():
    with pytest.raises(UserError, match=r"model\.architecture\.window: MistralConfig of transformers has no"):
        config_of(of("mistral", window=5))
    with pytest.raises(UserError, match=r"model\.architecture\.model_type: transformers knows no lama"):
        config_of(Architecture.model_validate(models.architecture("llama") | {"model_type": "lama"}))


def test_the_scale_of_logits_is_that_of_granite():
    assert logit_scale(AutoConfig.for_model("granite", logits_scaling=8.0)) == 1 / 8
    assert logit_scale(AutoConfig.for_model("llama")) == 1


def test_rows_at_which_the_frequencies_of_a_rope_would_change_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = AutoConfig.for_model("llama", max_position_embeddings=64, rope_parameters=rope)
    check_lengths(config, {"sft.max_length": 64}, "it")
    with pytest.raises(UserError, match="it: with a rope of type dynamic a sequence may have 64"):
        check_lengths(config, {"sft.max_length": 65}, "it")


@pytest.mark.parametrize("kind", sorted(set(TESTED) - {"gemma3_text"}))
def test_a_norm_in_one_kernel_is_the_types_own(kind):
    """In float32; how bfloat16 rounds is in test_decoding_layers.py."""
    model = models.model(kind, 64)
    norms = [module for module in model.modules() if type(module).__name__ in RMS_NORMS]
    assert norms
    x = torch.randn(3, norms[0].weight.shape[0])
    with torch.no_grad():
        for norm in norms:
            if norm.weight.shape[0] == x.shape[1]:
                norm.weight.normal_(1.0, 0.2)
                expected = norm(x)
                with decoding_layers.fused_norms(model):
                    torch.testing.assert_close(norm(x), expected)
