"""transformers: the device of its trainer, models without weights, and files that leave no trace in memory."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from peakmem.tensors import META

if TYPE_CHECKING:
    from peakmem.device import StandIn


def replacements(stand_in: "StandIn") -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield symbols, and what stands in the place of each: for transformers.Trainer on the stand-in."""
    if not stand_in.as_cuda:  # accelerate finds the trainers' device, and knows no stand-in
        yield "transformers.training_args:TrainingArguments.device", lambda _: property(_device)
        if stand_in.stands_for == "cuda":
            yield "transformers.training_args:is_torch_bf16_gpu_available", lambda _: lambda *_: True
    else:
        yield "transformers.modeling_utils:PreTrainedModel.from_pretrained", lambda _: _loading(stand_in)
        # A sequence ends where it is longest: the tokens that are drawn are not known.
        yield "transformers.trainer:Trainer._inner_training_loop", lambda train: _naming_later(stand_in, train)
        yield "transformers.generation.stopping_criteria:EosTokenCriteria.__call__", lambda _: _never
    yield "transformers.trainer:Trainer._save_checkpoint", _left_out
    yield "transformers.modeling_utils:PreTrainedModel.save_pretrained", _left_out


def _device(arguments: Any) -> Any:
    return arguments._setup_devices and META


def _loading(stand_in: "StandIn") -> Any:
    """Return what stands in for from_pretrained; of versions with other defaults and other steps it is refused."""
    from transformers import __version__ as version

    if int(version.partition(".")[0]) >= 5:
        return classmethod(_from_config)
    said = f"from_pretrained of transformers {version} (before 5) is not followed"
    return lambda *_, **__: stand_in.refuse(said)


def _from_config(
    cls: Any,
    path: Any,
    /,
    *arguments: Any,
    config: Any = None,
    dtype: Any = None,
    torch_dtype: Any = None,
    device_map: Any = None,
    attn_implementation: str | None = None,
    quantization_config: Any = None,
    **options: Any,
) -> Any:
    """Stand in for PreTrainedModel.from_pretrained: the model of a configuration, whose weights are nowhere.

    `path` is a folder with config.json, or a name whose configuration is in the hub's cache.
    """
    from transformers import modeling_utils
    from transformers.quantizers import AutoHfQuantizer

    if config is None or isinstance(config, str):
        config, options = cls.config_class.from_pretrained(config or path, return_unused_kwargs=True, **options)
    config = copy.deepcopy(config)
    config.name_or_path = str(path)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    for key in [key for key in options if hasattr(config, key)]:
        setattr(config, key, options[key])
    kind = dtype or torch_dtype or "auto"
    if isinstance(kind, str):
        kind = config.dtype or torch.float32 if kind == "auto" else getattr(torch, kind)
    kind = kind if isinstance(kind, torch.dtype) else getattr(torch, kind)
    model = cls._from_config(config, dtype=kind)
    packing = quantization_config or getattr(config, "quantization_config", None)
    quantizer = None
    if packing is not None:
        quantizer = AutoHfQuantizer.from_config(packing, pre_quantized=False)
        with modeling_utils.local_torch_dtype(kind):  # of the layers that take the place of others
            quantizer.preprocess_model(model=model, config=config, device_map=device_map)
        model.hf_quantizer = quantizer
    if device_map is not None or quantizer is not None:
        modeling_utils.caching_allocator_warmup(model, dict.fromkeys(dict(model.named_parameters()), 0), quantizer)
        nn.Module.to(model, "cuda")
    if quantizer is not None:
        quantizer.postprocess_model(model)
    return model.eval()


def _never(self: Any, input_ids: torch.Tensor, scores: object, **_: Any) -> torch.Tensor:
    return torch.full((input_ids.shape[0],), False, dtype=torch.bool, device=input_ids.device)


def _naming_later(stand_in: "StandIn", train: Any) -> Any:
    """Return the trainer's loop, which first says what it is set to do after the steps that are followed."""

    @functools.wraps(train)
    def trains(trainer: Any, *arguments: Any, **options: Any) -> Any:
        arguments_of = trainer.args
        for what, name in (("evaluation", "eval_strategy"), ("a checkpoint", "save_strategy")):
            when = str(getattr(getattr(arguments_of, name, "no"), "value", "no"))
            if when != "no":
                stand_in.note_later(f"{what}, which the trainer is set to make ({name} is {when})")
        return train(trainer, *arguments, **options)

    return trains


def _left_out(_: object) -> Any:
    return lambda *_, **__: None
