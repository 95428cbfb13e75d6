"""Reward models as classifiers: of types that transformers has none for, and whole checkpoints of others."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedConfig
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from rlhf.files import reading
from rlhf.models import checkpoints
from rlhf.models.nf4 import nf4_config
from rlhf.packages import install_command, require

UNBOUNDED = 1 << 30  # tokenizers without a longest text name a far larger number
Text = dict[str, list[int]]  # input_ids, and what else the tokenizer gives for each token


def add_classifier(config: PreTrainedConfig) -> None:
    """Give `AutoModelForSequenceClassification` a class for a type that transformers has none for, such as Granite.

    It is made as transformers makes the others: the decoder with a linear head.
    """
    if config.model_type in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        return
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    family = next(kind for kind in causal.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    name = causal.__name__.replace("ForCausalLM", "ForSequenceClassification")
    # transformers reads the source of the class's module for what it supports
    kept = {"__module__": causal.__module__, "config_class": type(config), "forward": _scores_of_last_tokens}
    kept["base_model_prefix"] = causal.base_model_prefix  # by which a checkpoint's weights find their places
    classifier = type(name, (GenericForSequenceClassification, family), kept)
    AutoModelForSequenceClassification.register(type(config), classifier, exist_ok=True)


def _scores_of_last_tokens(
    self: Any, input_ids: Tensor, attention_mask: Tensor | None = None, **_: object
) -> SequenceClassifierOutput:
    """Return a score (B, 1) at the last token of each row that is not padding: the forward pass of a classifier.

    transformers' own asks a decoder for a key-value cache, which recurrent ones do not have.
    """
    decoder: Any = getattr(self, self.base_model_prefix)
    states = decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    last = (places * (input_ids != self.config.pad_token_id)).argmax(-1)
    return SequenceClassifierOutput(logits=self.score(states[torch.arange(len(states), device=states.device), last]))


class Classifier:
    """A sequence-classification checkpoint with its tokenizer, from a folder or the hub at a pinned revision.

    Raises UserError for a checkpoint that cannot be loaded, has no classification head, or holds NaN.
    """

    def __init__(self, name: str, revision: str | None, device: str, packed: bool = False):
        """`packed`: linear layers in NF4 with double quantization."""
        self.device = torch.device(device)
        if packed:
            require(["bitsandbytes"], "reward_model: quantization='nf4'", install_command("gpu"))
        with reading(f"the reward model {name}"):
            self.tokenizer: Any = AutoTokenizer.from_pretrained(name, revision=revision)
            model = checkpoints.load(
                AutoModelForSequenceClassification,
                name,
                revision=revision,
                placed=False,
                device_map={"": self.device},
                quantization_config=nf4_config(torch.bfloat16) if packed else None,
            )
        self.model: Any = model.eval()
        config = self.model.config.get_text_config()
        self.labels: int = self.model.config.num_labels
        self.pads = config.pad_token_id is not None
        if self.pads:
            self.tokenizer.pad_token_id = config.pad_token_id
        context = getattr(config, "max_position_embeddings", None) or UNBOUNDED
        self.longest: int = min(context, self.tokenizer.model_max_length, UNBOUNDED)
        self.tokenizer.padding_side, self.tokenizer.truncation_side = "right", "left"

    def encode(self, messages: Sequence[Mapping[str, str]], answer: str) -> Text:
        """Return an answer to messages as the model reads it; what is too long loses its beginning.

        The tokenizer's chat template writes it; without one the messages and the answer are a pair of texts.
        """
        limits = {"truncation": True, "max_length": self.longest}
        if self.tokenizer.chat_template:
            dialogue = [*messages, {"role": "assistant", "content": answer}]
            return dict(self.tokenizer.apply_chat_template(dialogue, return_dict=True, **limits))
        asked = "\n\n".join(message["content"] for message in messages)
        return dict(self.tokenizer(asked, answer, **limits))

    @torch.no_grad()
    def scores(self, texts: Sequence[Text], batch_size: int) -> list[list[float]]:
        """Return the numbers of each text, those that transformers gives it alone.

        Texts of similar length are scored together; one at a time if the model's config names no padding token.
        """
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]["input_ids"]))
        rows: list[list[float]] = [[]] * len(texts)
        size = batch_size if self.pads else 1
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            padded = self.tokenizer.pad([texts[i] for i in batch], padding=self.pads, return_tensors="pt")
            logits = self.model(**padded.to(self.device)).logits.float().cpu()
            for i, row in zip(batch, logits.tolist(), strict=True):
                rows[i] = row
        return rows
