"""Base models, tokenizers and adapters, from the run directory, a folder or the hub."""

import ctypes
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    set_seed,
)

from rlhf import recipe as recipes
from rlhf.data import tokenize
from rlhf.data.formats import DataError
from rlhf.data.tokenize import Codec
from rlhf.run import Run, RunError

ADAPTER_FILE = "adapter_model.safetensors"


def device_of(recipe: recipes.Recipe) -> torch.device:
    """The recipe's device. Raises RunError when it asks for CUDA and none can be used."""
    if recipe.hardware.device == "cuda" and not torch.cuda.is_available():
        raise RunError(
            f"the recipe needs CUDA, and torch {torch.__version__} finds no usable GPU: see `nvidia-smi`, or use HW=cpu"
        )
    return torch.device(recipe.hardware.device)


def set_up_torch(recipe: recipes.Recipe) -> torch.device:
    """Pin threads and switch on deterministic kernels where they cost nothing; returns the device."""
    if recipe.hardware.threads:
        torch.set_num_threads(recipe.hardware.threads)
    device = device_of(recipe)
    if device.type == "cpu":
        _keep_freed_memory()
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time and changes no result of ours
    set_seed(recipe.seed)
    return device


def _keep_freed_memory() -> None:
    """Let glibc keep the pages of freed tensors for the next ones: asking the kernel anew costs 5 % of a PPO step."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, at its largest


def load_codec(run: Run) -> Codec:
    settings = run.loaded.recipe.tokenizer
    name = str(run.root / "pretrain" / "model") if settings.source == "train" else str(settings.name)
    try:
        return tokenize.load(name, settings.revision, settings.template)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise RunError(f"cannot load the tokenizer {name}: {' '.join(str(error).split())[:300]}") from error


def new_base(architecture: recipes.Architecture, codec: Codec, dtype: str) -> LlamaForCausalLM:
    """A Llama with random weights, drawn from torch's generator."""
    config = LlamaConfig(
        **architecture.model_dump(),
        vocab_size=len(codec.tokenizer),
        pad_token_id=codec.pad_id,
        bos_token_id=codec.tokenizer.bos_token_id,
        eos_token_id=codec.eos_id,
    )
    return LlamaForCausalLM(config).to(getattr(torch, dtype))


def base_name(run: Run) -> str:
    """What plain peft must be given as the base of this run's adapters."""
    model = run.loaded.recipe.model
    return str((run.root / "pretrain" / "model").resolve()) if model.source == "pretrain" else str(model.name)


def load_base(run: Run, device: torch.device, head: str = "lm", quantize: bool = True) -> PreTrainedModel:
    """The base with a language-model head (`lm`) or a new scalar head without bias (`score`).

    The scalar head is drawn from torch's generator: seed it first. `quantize` False loads full weights in any case.
    """
    settings = run.loaded.recipe.model
    options: dict[str, Any] = {"dtype": getattr(torch, settings.dtype), "device_map": {"": device}}
    if settings.source == "hub":
        options["revision"] = settings.revision
    if settings.attention != "auto":
        options["attn_implementation"] = settings.attention
    if settings.quantization == "nf4" and quantize:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, settings.dtype),
        )
    name = base_name(run)
    try:
        if head == "lm":
            return AutoModelForCausalLM.from_pretrained(name, **options)
        return AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, **options)
    except ImportError as error:
        if settings.quantization == "nf4":
            raise RunError("model.quantization: nf4 needs bitsandbytes: pip install '.[gpu]'") from error
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(f"cannot load the base model {name}: {' '.join(str(error).split())[:300]}") from error


def lora_config(run: Run, task_type: str) -> LoraConfig:
    lora = run.loaded.recipe.lora
    modules = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    return LoraConfig(
        task_type=task_type,
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=modules,
    )


def new_adapter(base: PreTrainedModel, run: Run) -> PeftModel:
    """A fresh LoRA adapter on a causal base; with B = 0 it changes nothing yet."""
    return get_peft_model(base, lora_config(run, "CAUSAL_LM"))


def trainable_adapter(base: PreTrainedModel, stage_dir: Path) -> PeftModel:
    """The adapter of a finished stage, to be trained on."""
    return PeftModel.from_pretrained(base, stage_dir / "adapter", is_trainable=True)


def reward_from_sft(base: PreTrainedModel, run: Run, sft_dir: Path) -> PeftModel:
    """A reward model whose LoRA weights are those of SFT and whose score head is new and trainable.

    peft cannot load a causal adapter into a classifier (it asks for the head's weight), so the weights are laid over
    those of a fresh classification adapter of the same shape.
    """
    model = get_peft_model(base, lora_config(run, "SEQ_CLS"))
    start, sft = get_peft_model_state_dict(model), adapter_weights(sft_dir)
    if {key for key in start if "lora_" in key} != set(sft):
        raise RunError(f"{sft_dir}/adapter does not have the shape of the recipe's lora section")
    outcome = set_peft_model_state_dict(model, {**start, **sft})
    assert not outcome.unexpected_keys
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # in bfloat16 the head would be too coarse for its own updates
    return model


def adapter_weights(stage_dir: Path) -> dict[str, torch.Tensor]:
    """Tensors of a finished stage's adapter, on the CPU."""
    return load_file(stage_dir / "adapter" / ADAPTER_FILE)


def save_adapter(model: PeftModel, run: Run, folder: Path, adapter: str = "default") -> None:
    """Write one adapter in peft's layout, directly into `folder`, so that plain peft loads it on the run's base."""
    base, revision = base_name(run), run.loaded.recipe.model.revision
    state = get_peft_model_state_dict(model, adapter_name=adapter)
    model.peft_config[adapter].save_pretrained(folder)
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    save_file(tensors, folder / ADAPTER_FILE, {"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    config.update(base_model_name_or_path=base, revision=revision, inference_mode=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
