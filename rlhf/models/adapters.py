"""LoRA adapters: fresh ones, those of finished stages for further training, and how they are written."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.models import weights as stored
from rlhf.models.folders import share_weights
from rlhf.models.precision import Model, computes_in_bfloat16
from rlhf.models.traits import has_fused_experts
from rlhf.process import distributed
from rlhf.recipe.schema_model import Lora
from rlhf.run.layout import ADAPTER, ADAPTER_CONFIG, ADAPTER_FILE

ModelT = TypeVar("ModelT", bound=Model)
# Names that peft takes for layers of experts, in its map of models whose experts became one tensor.
EXPERT_LAYERS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def lora_config(lora: Lora, base: PreTrainedModel, task_type: str) -> LoraConfig:
    """Return peft's configuration of a recipe's adapter on a base.

    Raises UserError for a target that names no module of the base.
    """
    return LoraConfig(
        task_type=task_type,
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=_targets(base, lora.target_modules),
    )


def new_adapter(base: PreTrainedModel, lora: Lora) -> PeftModel:
    """Attach a fresh LoRA adapter to a causal base. It starts with B = 0, so that outputs do not change.

    Raises UserError if the base lacks a target module.
    """
    return without_input_casts(get_peft_model(base, lora_config(lora, base, "CAUSAL_LM")))


def _targets(base: PreTrainedModel, targets: Sequence[str] | Literal["all-linear"]) -> list[str] | str:
    """Return the target modules of a base, for peft.

    Experts that share one tensor stay frozen: peft would give them adapters of another form wherever a target has the
    name of an expert's layer. `all-linear` then leaves those names out. Raises UserError for a target that does not
    match any module, with the names of the linear layers, and for one of an expert.
    """
    modules = dict(base.base_model.named_modules())
    linear = sorted({name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, nn.Linear)})
    experts = has_fused_experts(base)
    frozen = _read_by_kernels(base) | (EXPERT_LAYERS if experts else set())
    linear = [name for name in linear if name not in frozen]
    if isinstance(targets, str):  # all-linear
        return linear if frozen else targets
    for target in targets:
        if experts and target.rpartition(".")[2] in EXPERT_LAYERS:
            raise UserError(
                f"lora.target_modules: {target} is also the name of an expert's layer, and experts stay frozen; the "
                f"other linear layers are {', '.join(linear)}"
            )
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            raise UserError(
                f"lora.target_modules: the model has no {target}; its linear layers are {', '.join(linear)}"
            )
    return list(targets)


def _read_by_kernels(base: PreTrainedModel) -> set[str]:
    """Return names of linear layers whose weight a fused kernel of Mamba reads, past any adapter."""
    mixers = [module for module in base.modules() if hasattr(module, "A_log") and hasattr(module, "D")]
    return {"out_proj"} if mixers else set()


def trainable_adapter(base: PreTrainedModel, stage_dir: Path) -> PeftModel:
    """Attach the adapter of a finished stage to a base, for further training."""
    return without_input_casts(stored.attach_adapter(base, stage_dir, trainable=True))


def reward_from_sft(base: PreTrainedModel, lora: Lora, sft_dir: Path | None) -> PeftModel:
    """Return a reward model whose LoRA weights are those of SFT, or without SFT new, and whose score head is new.

    peft cannot load a causal adapter into a classifier (it looks for the head's weight), so the weights are copied over
    those of a fresh classification adapter of the same shape.
    """
    model = without_input_casts(get_peft_model(base, lora_config(lora, base, "SEQ_CLS")))
    if sft_dir is not None:
        start, sft = get_peft_model_state_dict(model), stored.adapter_weights(sft_dir)
        fresh = {key: weight for key, weight in start.items() if "lora_" in key}
        stored.check_shapes(sft, fresh, str(sft_dir / ADAPTER / ADAPTER_FILE))
        stored.set_adapter_state(model, {**start, **sft})
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # in bfloat16 the head would be too coarse for its own updates
    return model


def without_input_casts(model: ModelT) -> ModelT:
    """Keep LoRA layers on a bfloat16 base from copying their inputs to float32; return the same model.

    Autocast casts such a copy back to bfloat16 before the product. Without the two casts the numbers are the same, and
    the backward pass keeps one input for all layers that share it, not a copy for each. With dropout the mask is
    applied in bfloat16 instead of float32, as peft's 4-bit layers always do. Outside of autocast such a layer would
    raise an error for its input.
    """
    if computes_in_bfloat16(model):
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.cast_input_dtype_enabled = False
    return model


def save_adapter(
    model: PeftModel,
    revision: str | None,
    folder: Path,
    adapter: str = "default",
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write one adapter in peft's layout, directly into `folder`, so that plain peft loads it on its base.

    `revision`: the base's commit on the hub. Of several processes one writes. `weights`: the model's weights by name,
    if the model itself does not hold them whole.
    """
    if distributed.rank():
        return
    base = model.get_base_model().name_or_path or "random weights"
    weights = weights or dict(model.named_parameters())  # state_dict() of a divided base waits for all ranks
    state = get_peft_model_state_dict(model, state_dict=weights, adapter_name=adapter)
    model.peft_config[adapter].save_pretrained(str(folder))
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    save_file(tensors, folder / ADAPTER_FILE, {"format": "pt"})
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    config.update(base_model_name_or_path=base, revision=revision, inference_mode=True)
    if isinstance(config["target_modules"], list):  # of a set, whose order differs from process to process
        config["target_modules"].sort()
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    share_weights(folder / ADAPTER_CONFIG)
