"""A few training steps of an adapter on one card, as two public scripts measure them, on the stand-in device.

`scripts/measure.py` of fitcheck-llm 0.3.1 and `src/canifinetune/bench/runner.py` of can-i-finetune-this both load a
model, prepare a 4-bit one with peft, add LoRA and run steps on random tokens of full length. This is our own code for
what such a run holds.
"""

import collections
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple
from unittest import mock

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.quantizers import AutoHfQuantizer, HfQuantizer

from peakmem.cards import Gpu
from peakmem.depth import releases_in_order
from peakmem.device import StandIn
from peakmem.events import Event, Work
from peakmem.tensors import META
from rlhf.models import random_base
from rlhf.models.nf4 import quantized

Packing = Literal["none", "nf4", "nf4 with double quantization"]
FORWARD, BACKWARD, OPTIMIZER, STEP = "forward", "backward", "optimizer", "step"
WORKERS = 4  # threads that put weights on the card, ahead of the one that packs them (transformers 5.0 to 5.23)


class Setting(NamedTuple):
    """What decides the memory of a run."""

    shape: dict[str, Any]  # fields of the architecture, with `model_type` and `num_hidden_layers`
    gpu: Gpu
    dtype: torch.dtype  # of an unpacked base, and of computing with a packed one
    packing: Packing
    attention: Literal["eager", "sdpa"]
    rank: int
    targets: tuple[str, ...]
    rows: int
    length: int
    steps: int
    optimizer: Literal["adamw", "paged_adamw_8bit"]
    checkpointing: bool
    expands_heads: bool = False  # keys and values are repeated for every query head before attention
    clears_after: bool = False  # can-i-finetune-this: a mask goes with the tokens, and gradients end with the step


class Rehearsed(NamedTuple):
    """A run at one depth."""

    events: list[Event]
    work: dict[str, Work]  # by phase


def rehearse(setting: Setting, layers: int) -> Rehearsed:
    """Load the model and run the steps; phases are `step` and, inside it, `forward`, `backward` and `optimizer`."""
    transformers.set_seed(0)
    gc.collect()
    gc.disable()  # what Python's collector frees, and when, would differ between depths
    try:
        phases = (STEP, FORWARD, BACKWARD, OPTIMIZER)
        recorder = StandIn("cuda", phases, setting.shape["vocab_size"], setting.gpu)
        with recorder, _heads_expanded(setting):
            model = _model(setting, layers, recorder)
            optimizer = _optimizer(setting, [p for p in model.parameters() if p.requires_grad])
            model.train()
            _steps(setting, model, optimizer)
        work = {name: peak.work for name, peak in recorder.peaks().items()}
        return Rehearsed(releases_in_order(recorder.events()), work)
    finally:
        gc.enable()


@contextlib.contextmanager
def _heads_expanded(setting: Setting) -> Iterator[None]:
    """Repeat keys and values for every query head inside the block, as measure.py does."""
    if not setting.expands_heads:
        yield
        return
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention

    def expanded(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            options.pop("enable_gqa", None)
        return attend(q, k, v, *args, **options)

    with mock.patch.object(F, "scaled_dot_product_attention", expanded):
        yield


def _model(setting: Setting, layers: int, recorder: StandIn) -> Any:
    """Return the model with its adapter, as the scripts make it."""
    model = _base(setting, layers, recorder)
    form = {"use_reentrant": False}
    if setting.packing != "none":
        model = peft.prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=setting.checkpointing, gradient_checkpointing_kwargs=form
        )
    elif setting.checkpointing:
        model.gradient_checkpointing_enable(form)
    lora = peft.LoraConfig(
        r=setting.rank,
        lora_alpha=setting.rank,
        lora_dropout=0.0,
        target_modules=list(setting.targets),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, lora)


def _base(setting: Setting, layers: int, recorder: StandIn) -> Any:
    """Return the base on the card: a packed one as transformers loads it there, another one moved from the CPU."""
    fields = {**setting.shape, "num_hidden_layers": layers}
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    quantizer = _quantizer(setting)
    options: Any = {"dtype": setting.dtype, "attn_implementation": setting.attention}
    with recorder.paused():  # it takes no memory, on `meta` in earnest
        model: Any = random_base.skeleton(transformers.AutoModelForCausalLM, config, quantizer, options)
    weights = [
        (f"{path}.{name}" if path else name, module, name)
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if not (config.tie_word_embeddings and path == "lm_head")
    ]
    if quantizer:
        weights.sort(key=lambda weight: _natural(weight[0]))
        _warm_up(weights, setting)
    _load(weights, setting)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=META)
    model.tie_weights()
    if quantizer:
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    model.hf_device_map = {"": META}
    model.config.use_cache = setting.clears_after and not setting.checkpointing
    return model.eval()


def _quantizer(setting: Setting) -> HfQuantizer | None:
    if setting.packing == "none":
        return None
    packing = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=setting.dtype,
        bnb_4bit_use_double_quant=setting.packing != "nf4",
    )
    quantizer: HfQuantizer = AutoHfQuantizer.from_config(packing)
    return quantizer


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return the key by which transformers orders a checkpoint's weights: whole numbers count as numbers."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _load(weights: list[tuple[str, nn.Module, str]], setting: Setting) -> None:
    """Put weights on the card one after another; those that are packed there arrive ahead, WORKERS at a time."""
    ahead: collections.deque[Tensor] = collections.deque()
    at_once = 1 if setting.packing == "none" else WORKERS
    double = setting.packing != "nf4"
    for place, (_, module, name) in enumerate(weights):
        while len(ahead) < min(at_once, len(weights) - place):
            _, coming, its_name = weights[place + len(ahead)]
            ahead.append(torch.empty(getattr(coming, its_name).shape, dtype=setting.dtype, device=META))
        weight = ahead.popleft()
        packed = _is_packed(module, name)
        setattr(module, name, quantized(module, weight, double) if packed else nn.Parameter(weight))


def _is_packed(module: nn.Module, name: str) -> bool:
    return type(module).__name__ == "Linear4bit" and name == "weight"


def _warm_up(weights: list[tuple[str, nn.Module, str]], setting: Setting) -> None:
    """Allocate and release what the weights take on the card, as transformers does before it loads them there."""
    total = sum(
        getattr(module, name).numel() * (0.5 if _is_packed(module, name) else setting.dtype.itemsize)
        for _, module, name in weights
    )
    torch.empty(int(total) // 2, dtype=torch.float16, device=META)


def _optimizer(setting: Setting, weights: list[nn.Parameter]) -> Any:
    """Return the script's optimizer."""
    if setting.optimizer == "adamw":
        return torch.optim.AdamW(weights, lr=1e-4)
    import bitsandbytes

    return bitsandbytes.optim.PagedAdamW8bit(weights, lr=1e-4)


def _steps(setting: Setting, model: Any, optimizer: Any) -> None:
    """Run the steps in one frame, so that an output dies where the script's own name for it is given the next one.

    can-i-finetune-this keeps an output through the next forward pass, and no longer; measure.py's step is a function,
    whose output dies with it.
    """
    batch = torch.ones((setting.rows, setting.length), dtype=torch.int64).to(META)
    out = None
    for step in range(setting.steps):
        if setting.clears_after:
            batch = torch.ones((setting.rows, setting.length), dtype=torch.int64).to(META)
        named = step > 0 or setting.clears_after
        phase: Callable[[str], contextlib.AbstractContextManager[Any]] = (
            torch.profiler.record_function if named else lambda name: contextlib.nullcontext()
        )
        extra = {"attention_mask": torch.ones_like(batch)} if setting.clears_after else {}
        with phase(STEP):
            if not setting.clears_after:
                optimizer.zero_grad()
            with phase(FORWARD):
                out = model(input_ids=batch, labels=batch, **extra)
            with phase(BACKWARD):
                out.loss.backward()
            with phase(OPTIMIZER):
                optimizer.step()
            if setting.clears_after:
                optimizer.zero_grad()
        if not setting.clears_after:
            out = None
