"""LoRA adapters: fresh ones, those of finished stages, their weights, and how they are written."""

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.errors import UserError
from rlhf.files import reading
from rlhf.models.checkpoints import share_weights, tensors
from rlhf.models.precision import Model, computes_in_bfloat16
from rlhf.models.traits import has_fused_experts
from rlhf.process import distributed
from rlhf.recipe.schema_model import Lora

SCORE_WEIGHT = "base_model.model.score.weight"  # a reward model's head in its adapter
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
    return attach(base, "default", lora_config(lora, base, "CAUSAL_LM"))


def _targets(base: PreTrainedModel, targets: Sequence[str] | Literal["all-linear"]) -> list[str] | str:
    """Return the target modules of a base, for peft.

    Experts that share one tensor stay frozen: peft would give them adapters of another form wherever a target has the
    name of an expert's layer. `all-linear` then leaves those names out, and those of layers whose weight a fused kernel
    of Mamba reads, past any adapter. Raises UserError for a target that does not match any module, with the names of
    the linear layers, and for one of an expert.
    """
    modules = dict(base.base_model.named_modules())
    experts = EXPERT_LAYERS if has_fused_experts(base) else set()
    mamba = {"out_proj"} if any(hasattr(module, "A_log") for module in modules.values()) else set()
    linear = {name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, nn.Linear)}
    free = sorted(linear - experts - mamba)
    if isinstance(targets, str):  # all-linear
        return free if experts or mamba else targets
    for target in targets:
        known = any(f".{name}".endswith(f".{target}") for name in modules)
        if not known or target.rpartition(".")[2] in experts:
            why = "is also the name of an expert's layer, and experts stay frozen" if known else "names no module"
            raise UserError(f"lora.target_modules: {target} {why}; the linear layers are {', '.join(free)}")
    return list(targets)


def attach(base: Model, name: str, config: LoraConfig, weights: Mapping[str, Tensor] | None = None) -> PeftModel:
    """Attach an adapter to a base, which may have others already. Without `weights` it is new, with B = 0.

    LoRA layers on a bfloat16 base do not copy their inputs to float32: autocast casts such a copy back to bfloat16
    before the product. Without the two casts the numbers are the same, and the backward pass keeps one input for all
    layers that share it, not a copy for each. With dropout the mask is applied in bfloat16 instead of float32, as
    peft's 4-bit layers always do. Outside of autocast such a layer would raise an error for its input.
    """
    if isinstance(base, PeftModel):
        model = base
        model.add_adapter(name, config)
    else:
        model = get_peft_model(base, config, name)
    if weights is not None:
        set_adapter_state(model, weights, name)
    if computes_in_bfloat16(model):
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.cast_input_dtype_enabled = False
    return model


def attach_adapter(base: PreTrainedModel, folder: Path, trainable: bool = False) -> PeftModel:
    """Attach the adapter in a folder to a base."""
    config = adapter_config(folder)
    config.inference_mode = not trainable
    return attach(base, "default", config, adapter_weights(folder))


def reward_from_sft(base: PreTrainedModel, lora: Lora, sft: Path | None) -> PeftModel:
    """Return a reward model whose LoRA weights are those of SFT's adapter, or new, and whose score head is new.

    peft cannot load a causal adapter into a classifier (it looks for the head's weight), so the weights are copied over
    those of a fresh classification adapter of the same shape.
    """
    model = attach(base, "default", lora_config(lora, base, "SEQ_CLS"))
    if sft is not None:
        set_adapter_state(model, {**adapter_state(model), **adapter_weights(sft)})
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # in bfloat16 the head would be too coarse for its own updates
    return model


def adapter_config(folder: Path) -> LoraConfig:
    """Return the configuration of the adapter in a folder."""
    with reading(folder / CONFIG_NAME):
        config: LoraConfig = LoraConfig.from_pretrained(str(folder))
    return config


def adapter_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the adapter in a folder, on the CPU. Raises UserError where one is not finite."""
    return tensors(folder / SAFETENSORS_WEIGHTS_NAME)


def adapter_state(model: PeftModel, name: str = "default") -> dict[str, Tensor]:
    """Return the weights of one adapter by the names that they have in its file."""
    weights: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=dict(model.named_parameters()), adapter_name=name
    )
    return weights


def set_adapter_state(model: PeftModel, weights: Mapping[str, Tensor], name: str = "default") -> None:
    """Set weights of an adapter by their names, which must all be names of this adapter."""
    outcome: Any = set_peft_model_state_dict(model, dict(weights), adapter_name=name)
    assert not outcome.unexpected_keys


def save_adapter(
    model: PeftModel,
    revision: str | None,
    folder: Path,
    adapter: str = "default",
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write one adapter in peft's layout, directly into `folder`, so that plain peft loads it on its base.

    `revision`: the base's commit on the hub. Of several processes one writes. `weights`: the model's weights by name,
    if the model itself does not hold them whole.
    """
    if distributed.rank():
        return
    weights = weights or dict(model.named_parameters())  # state_dict() of a divided base waits for all ranks
    state = get_peft_model_state_dict(model, state_dict=weights, adapter_name=adapter)
    config: Any = copy(model.peft_config[adapter])
    config.base_model_name_or_path = model.get_base_model().name_or_path or "random weights"
    config.revision, config.inference_mode = revision, True
    if not isinstance(config.target_modules, str):  # a set, whose order differs from process to process
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))
    found = {key: value.detach().cpu().contiguous() for key, value in state.items()}
    save_file(found, folder / SAFETENSORS_WEIGHTS_NAME, {"format": "pt"})
    share_weights(folder / CONFIG_NAME)
