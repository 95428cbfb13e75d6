"""fms-acceleration's runs rehearsed: full rows, gradient checkpointing, LoRA on a bfloat16 or an NF4 base.

The runs used TRL's SFTTrainer of 2025. This is our own code for what a step of it holds: the loss in float32 over
shifted copies of the logits, autocast where the runs had it, gradients clipped, AdamW with lists of tensors.
"""

import contextlib
import gc
from typing import Any, NamedTuple

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from peakmem.cards import SMALL_WORKSPACE, Gpu
from peakmem.depth import deepen
from peakmem.device import StandIn
from peakmem.events import DEPTHS, Event, Work
from peakmem.replaying import replay
from peakmem.tensors import META
from rlhf.models.nf4 import nf4_config
from rlhf.models.random_base import LoadingOptions, random_base
from rlhf.recipe.schema_model import Model
from studies.kinds import PackedRow
from studies.outside.collect_fms import PackedRun
from studies.outside.depths import work_of_step

A100 = Gpu((8, 0), 108)  # NVIDIA A100 data sheet
LENGTH, STEPS = 4096, 2
SHAPES: dict[str, dict[str, Any]] = {
    "mistralai/Mistral-7B-v0.1": {
        "model_type": "mistral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "NousResearch/Llama-2-70b-hf": {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "ibm/PowerLM-3b": {
        "model_type": "granite",
        "num_hidden_layers": 40,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 36,
        "num_key_value_heads": 36,
        "vocab_size": 49152,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 9.0,
    },
}


def name(run: PackedRun) -> str:
    """Return a run's name in tables: model, base, method, rows."""
    return f"{run['model'].split('/')[1]}, {run['base']}, {run['method']}, {run['rows']} rows"


class Predicted(NamedTuple):
    """What is predicted for a run: bytes at the peak, and after a step; and the work of one step."""

    allocated: int
    reserved: int
    after_step: int
    work: Work


def predict(run: PackedRun) -> PackedRow:
    """Return one run's figures, in bytes: the peak of allocated memory, and what is allocated after a step."""
    found = predicted_for(run["model"], run["base"], run["method"], run["rows"])
    predicted = {"peak_allocated": found.allocated, "allocated": found.after_step}
    measured = {"peak_allocated": run["measured"]["peak_allocated"], "allocated": run["measured"]["allocated"]}
    return {
        "name": name(run),
        "measured": measured,
        "predicted": predicted,
        "error": {size: predicted[size] / measured[size] - 1 for size in predicted},
        "step": {
            "flops": found.work.flops,
            "moved": found.work.moved,
            "launched": found.work.launched,
            "seconds_measured": run["rows"] * LENGTH / run["measured"]["tokens_per_second"],
        },
    }


def predicted_for(model: str, base: str, method: str, rows: int) -> Predicted:
    """Return what is predicted for a run with these settings."""
    (few, few_work), (more, more_work) = (_rehearse(model, base, method, rows, depth) for depth in DEPTHS)
    layers = SHAPES[model]["num_hidden_layers"]
    events = deepen(few, more, layers).events
    held = replay(events, expandable=False, workspace=SMALL_WORKSPACE)["train"]
    return Predicted(
        held.allocated,
        held.reserved,
        sum(event.bytes for event in events) + 2 * SMALL_WORKSPACE,
        work_of_step(few_work, more_work, layers, STEPS),
    )


def _rehearse(model_name: str, base: str, method: str, rows: int, layers: int) -> tuple[list[Event], Work]:
    """Return the events of loading and of STEPS steps, and the work of these steps.

    The first step makes the optimizer's states.
    """
    transformers.set_seed(0)
    gc.collect()
    gc.disable()  # what Python's collector frees, and when, would differ between depths
    try:
        recorder = StandIn("cuda", ("train",), SHAPES[model_name]["vocab_size"], A100)
        with recorder:
            model = _model(model_name, base, method, layers)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
            model.train()
            with torch.profiler.record_function("train"):
                for _ in range(STEPS):
                    _step(base, rows, model, optimizer)
        return recorder.events(), recorder.peaks()["train"].work
    finally:
        gc.enable()


def _model(model_name: str, base: str, method: str, layers: int) -> Any:
    """Return the model as a run trains it, with checkpointing switched on."""
    four_bit = base != "bfloat16"
    fields = {**SHAPES[model_name], "num_hidden_layers": layers}
    settings = Model.model_validate(
        {"source": "random", "architecture": fields, "quantization": "nf4" if four_bit else "none", "dtype": "bfloat16"}
    )
    options: LoadingOptions = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    nf4 = nf4_config(settings) if four_bit else None
    model = random_base(settings, META, transformers.AutoModelForCausalLM, nf4, options)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if base == "nf4, prepared by peft":
        # peft makes float32 of all that is not packed, and TRL 0.13 bfloat16 of the embeddings and the head again.
        for module in model.modules():
            if type(module).__name__ in ("MistralRMSNorm", "GraniteRMSNorm"):
                module.to(torch.float32)
    if method == "full":
        return model
    lora = peft.LoraConfig(
        r=16, lora_alpha=16, lora_dropout=0.1, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    return peft.get_peft_model(model, lora)


def _step(base: str, rows: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Run one optimizer step."""
    ids = torch.ones((rows, LENGTH), dtype=torch.int64).to(META)
    with _precision(base):
        loss = _loss(model, ids)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _precision(base: str) -> contextlib.AbstractContextManager[Any]:
    """Return autocast to bfloat16, which the runs with an NF4 base asked for and the others did not."""
    return contextlib.nullcontext() if base == "bfloat16" else torch.autocast("meta", torch.bfloat16)


def _loss(model: Any, ids: Tensor) -> Tensor:
    """Return cross-entropy in float32 over a shifted copy of the logits, as transformers 4.48 computes it.

    Later versions need no copy. The decoder's output and the logits live until the loss is known.
    """
    plain: Any = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    hidden = plain.model(input_ids=ids).last_hidden_state
    logits = plain.lm_head(hidden)
    if plain.config.model_type == "granite":  # transformers 4.45 keeps the logits in float32 alone
        logits = (logits / plain.config.logits_scaling).float()
    numbers = logits.float()
    shifted = numbers[:, :-1].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), ids[:, 1:].reshape(-1))
