"""PEFT's comparison on MetaMathQA, rehearsed: its training loop on the stand-in device, for one run of it.

Our own code for what method_comparison/MetaMathQA/run.py does between loading the model and the end of a step; what it
leaves out needs no memory then (evaluation, logging) or has gone before training.
"""

import gc
import types
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import peft
import peft.optimizers
import torch
import transformers
from torch import Tensor, nn

from peakmem.cards import Gpu
from peakmem.device import StandIn
from peakmem.events import Event
from peakmem.tensors import META
from studies.outside.collect import PeftRun, Training

L40S = Gpu((8, 9), 142)  # compute capability; NVIDIA's L40S data sheet: 142 multiprocessors
LAYERS, VOCABULARY, ROWS, STEPS, WARMUP = 28, 128256, 4, 5000, 500
PAD = 128001
STEP = "step"  # marks the start of each
SHAPE: dict[str, Any] = {  # Llama-3.2-3B
    "hidden_size": 3072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": PAD,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


class Recorder(StandIn):
    """The stand-in for the L40S, which also keeps the bytes that were asked for, before they are rounded."""

    def __init__(self) -> None:
        super().__init__("cuda", ("train",), VOCABULARY, L40S)
        self._requested: list[int] = []
        self.steps: list[tuple[int, int, int]] = []  # flops, bytes moved and operations launched before each step

    def allocate(self, size: int, operation: str) -> int:
        """Note the size that is asked for."""
        self._requested.append(size)
        return super().allocate(size, operation)

    def mark(self, name: str) -> None:
        """Note a mark, and for one of a step the work until then."""
        if name == STEP:
            work = self.total_work()
            self.steps.append((work.flops, work.moved, work.launched))
        super().mark(name)

    def requests(self) -> list[Event]:
        """Return the events, with the bytes that were asked for."""
        requested = []
        for event in self.events():
            if event.storage is not None:
                size = self._requested[event.storage]
                event = event._replace(bytes=size if event.bytes > 0 else -size)
            requested.append(event)
        return requested


class Rehearsed(NamedTuple):
    """A run at one depth."""

    events: list[Event]  # of loading, and of each training step
    trainable: int  # parameters
    work: np.ndarray  # (steps, 3): floating-point operations, bytes moved, operations launched


def rehearse(run: PeftRun, layers: int, lengths: Sequence[int]) -> Rehearsed:
    """Load the model and train one step for each of `lengths`, the tokens of the longest row of a batch.

    `run` is one of the runs of peft-metamath.json.
    """
    training, adapter = run["training"], run["adapter"]
    transformers.set_seed(0)
    gc.collect()
    gc.disable()  # what Python's collector frees, and when, would differ between depths
    try:
        recorder = Recorder()
        with recorder:
            model = _base_model(recorder, layers, training["attn_implementation"])
            if adapter:
                settings = _config(adapter, layers)
                model = peft.get_peft_model(model, settings, autocast_adapter_dtype=training["autocast_adapter_dtype"])
                _move_weights(model)
            _check(model)
            optimizer, schedule = _optimizer(model, training)
            trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
            if adapter:
                with model.disable_adapter():  # the loss of the base is taken here; adapters are trainable afterwards
                    pass
            model.train()
            _train(recorder, model, optimizer, schedule, lengths)
        return Rehearsed(recorder.requests(), trainable, np.diff(np.array(recorder.steps, dtype=np.int64), axis=0))
    finally:
        gc.enable()


def _base_model(recorder: Recorder, layers: int, attention: str | None) -> Any:
    """Return the model, each of whose weights and buffers is allocated by itself, as from_pretrained does."""
    config = transformers.LlamaConfig(num_hidden_layers=layers, **SHAPE)
    options = {"attn_implementation": attention} if attention else {}
    with recorder.paused(), torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options)
    for parameter in model.parameters():
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=META)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=META)
    model.name_or_path = "meta-llama/Llama-3.2-3B"
    return model.eval()


def _config(adapter: dict[str, Any], layers: int) -> peft.PeftConfig:
    """Return the adapter's settings; one that names every layer gets as many as there are here."""
    if adapter.get("adapter_layers") == LAYERS:
        adapter = adapter | {"adapter_layers": layers}
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(adapter["peft_type"])]
    known = {field.name for field in fields(kind) if field.init}
    return kind(**{key: value for key, value in adapter.items() if key in known and key != "peft_type"})


def _move_weights(model: nn.Module) -> None:
    """Put weights that an adapter leaves on the CPU on the stand-in device; buffers stay where they are."""
    for module in model.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            if weight.device != META:
                module._parameters[name] = nn.Parameter(weight.to(META), weight.requires_grad)


def _check(model: nn.Module) -> None:
    """Raise RuntimeError if a weight is not on the stand-in device: it would not count."""
    elsewhere = [name for name, parameter in model.named_parameters() if parameter.device != META]
    if elsewhere:
        raise RuntimeError(f"{len(elsewhere)} weights stay on the CPU, {elsewhere[0]} for one")


def _optimizer(model: Any, training: Training) -> tuple[torch.optim.Optimizer, Any]:
    """Return the run's optimizer and its schedule, which may do nothing."""
    options, kind = dict(training["optimizer_kwargs"]), training["optimizer_type"]
    if kind == "lora-fa":
        optimizer = peft.optimizers.create_lorafa_optimizer(model, **options)
    elif kind == "lora+":
        optimizer = peft.optimizers.create_loraplus_optimizer(model, optimizer_cls=torch.optim.AdamW, **options)
    else:
        optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    if training["lr_scheduler"] != "cosine":
        return optimizer, types.SimpleNamespace(step=lambda: None)
    return optimizer, transformers.get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS)


def _train(recorder: Recorder, model: Any, optimizer: Any, schedule: Any, lengths: Sequence[int]) -> None:
    """Run the steps of PEFT's run.py.

    A name keeps its tensor until it gets a new one, as in run.py: a step's logits live on into the next forward pass.
    """
    adaptive = getattr(model, "peft_config", None) and type(model.active_peft_config).__name__ == "AdaLoraConfig"
    for step, longest in enumerate(lengths, 1):
        recorder.mark(STEP)
        batch = _batch(longest)
        batch = {name: values.to(META) for name, values in batch.items()}
        labels = batch["input_ids"].clone()
        for row in range(ROWS):
            labels[row, _length(row, longest) + 1 :] = -100
        batch["labels"] = labels
        items = batch["attention_mask"].sum().item()
        optimizer.zero_grad()
        outputs = model(**batch, num_items_in_batch=items)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if adaptive:
            model.base_model.update_and_allocate(step)
        loss.item()
    recorder.mark(STEP)


def _batch(longest: int) -> dict[str, Tensor]:
    """Return the rows on the CPU, padded on the right."""
    ids, mask = torch.full((ROWS, longest), PAD), torch.zeros((ROWS, longest), dtype=torch.int64)
    for row in range(ROWS):
        ids[row, : _length(row, longest)], mask[row, : _length(row, longest)] = 1000 + row, 1
    return {"input_ids": ids, "attention_mask": mask}


def _length(row: int, longest: int) -> int:
    """Return the tokens of a row; each row is two shorter than the one before."""
    return max(2, longest - 2 * row)
