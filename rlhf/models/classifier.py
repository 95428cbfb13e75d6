"""Classifiers for types of models that transformers has none for; a reward model is a classifier with one number."""

from typing import Any

from transformers import AutoModelForSequenceClassification, PreTrainedConfig
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)


def add_classifier(config: PreTrainedConfig) -> None:
    """Give `AutoModelForSequenceClassification` a class for a type that transformers has none for, such as Granite.

    It is made as transformers makes the others: the decoder with a linear head.
    """
    if config.model_type in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        return
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    family = next(kind for kind in causal.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    name = causal.__name__.replace("ForCausalLM", "ForSequenceClassification")
    classifier = type(name, (GenericForSequenceClassification, family), {"__module__": __name__})
    AutoModelForSequenceClassification.register(type(config), classifier, exist_ok=True)
