"""litgpt's fine-tuning: its models, adapters, losses and Fabric's wrapping as they are, and our own code of its loop.

`python -m studies.outside.others.litgpt FOLDER` predicts for the code in FOLDER: settings of runs on standard input, a
line of JSON for each on standard output. lit-gpt at 8641822 and 0f021f3a, and litgpt 0.4.

A step's logits live on into the next forward pass, as in the loops. A base in NF4 is packed weight by weight, as
Fabric's plugin does on a card. The first script validates before it trains with adapters, which keeps the prefix's keys
and values without their graph.
"""

import contextlib
import importlib
import json
import sys
import time
from typing import Any
from unittest import mock

import bitsandbytes as bnb
import lightning
import torch
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import nn

from peakmem import StandIn
from peakmem.cards import CARDS, Gpu
from rlhf.models.nf4 import quantized
from studies.outside.others.measure import META, Peaks, numbers, peaks

A10G = Gpu((8, 6), 80)  # NVIDIA A10 data sheet, GA102 with 80 multiprocessors
LIT_GPT = {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "to_query": True, "to_value": True}
SCRIPTS = {"lora": "lora", "adapter": "adapter", "adapter_v2": "adapter_v2"}
SWITCHES = ("lora_query", "lora_key", "lora_value", "lora_projection", "lora_mlp", "lora_head")
HEAD_CHUNK = 128  # lm_head_chunk_size of the scripts with LoRA or adapters


class _Accelerator(CPUAccelerator):  # type: ignore[misc]  # lightning may not be installed
    def setup_device(self, device: torch.device) -> None:
        """Take the stand-in device too."""


def predict(run: dict[str, Any]) -> Peaks:
    """Return what is predicted for a run of either set's settings."""
    old = "longest_row_tokens" in run

    def train(recorder: StandIn) -> None:
        fabric = lightning.Fabric(
            strategy=SingleDeviceStrategy(device=META, accelerator=_Accelerator()), precision="bf16-true", devices=1
        )
        packing = run["quantize"] if old else run["yaml"].get("quantize")
        packed = mock.patch("torch.nn.Linear", _nf4_linear(packing == "bnb.nf4-dq")) if packing else None
        with fabric.init_module(empty_init=True), packed or contextlib.nullcontext():
            model, loss_of = _lit_gpt(run) if old else _litgpt(run)
        trainable = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        if trainable != run.get("trainable_params", trainable):
            raise ValueError(f"{trainable:,} trainable parameters, the run has {run['trainable_params']:,}")
        model = fabric.setup_module(model)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer: Any = bnb.optim.PagedAdamW(weights) if packing else torch.optim.AdamW(weights)
        length = run["longest_row_tokens"] if old else run["max_seq_length"]
        model.max_seq_length = length
        _validate(model, run["micro_batch_size"], length, old)
        model.train()
        logits = None
        for step in range(4):
            ids, targets = (numbers(run["micro_batch_size"], length) for _ in range(2))
            if run["method"] == "full":
                logits = model(ids)
                loss = loss_of(logits[..., :-1, :], targets[..., 1:])
            else:
                logits = model(ids, lm_head_chunk_size=HEAD_CHUNK)
                logits[-1] = logits[-1][..., :-1, :]
                loss = loss_of(logits, targets[..., 1:])
            fabric.backward(loss / 8)
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    return peaks(train, CARDS["a100"].gpu if old else A10G)


def _validate(model: Any, rows: int, length: int, old: bool) -> None:
    """Run a batch without gradients, of the longest rows for litgpt 0.4, whose validation has logits of all rows."""
    model.eval()
    with torch.no_grad():
        model(numbers(rows, min(length, 128) if old else length))


def _lit_gpt(run: dict[str, Any]) -> tuple[Any, Any]:
    """Return a model of lit-gpt of 2023 and its loss."""
    method = run["method"]
    module = importlib.import_module(f"lit_gpt.{SCRIPTS[method]}")
    lora = {key.removeprefix("lora_"): value for key, value in LIT_GPT.items()} if method == "lora" else {}
    model = module.GPT(module.Config.from_name(name=run["model_config_name"], **lora))
    getattr(module, f"mark_only_{method}_as_trainable")(model)
    return model, importlib.import_module("lit_gpt.utils").chunked_cross_entropy


def _litgpt(run: dict[str, Any]) -> tuple[Any, Any]:
    """Return a model of litgpt 0.4 and its loss."""
    settings, name = run["yaml"], run["model_config_name"]
    loss_of = importlib.import_module("litgpt.utils").chunked_cross_entropy
    if run["method"] == "full":
        module = importlib.import_module("litgpt.model")
        return module.GPT(module.Config.from_name(name)), loss_of
    module = importlib.import_module("litgpt.lora")
    config = module.Config.from_name(
        name,
        lora_r=int(settings["lora_r"]),
        lora_alpha=int(settings["lora_alpha"]),
        lora_dropout=float(settings["lora_dropout"]),
        **{switch: settings[switch] == "true" for switch in SWITCHES},
    )
    model = module.GPT(config)
    module.mark_only_lora_as_trainable(model)
    return model, loss_of


def _nf4_linear(double: bool) -> type[nn.Module]:
    """Return a linear layer whose weight is packed as soon as it exists."""

    class Packed(bnb.nn.Linear4bit):
        def __init__(self, in_features: int, out_features: int, bias: bool = True, **_: Any) -> None:
            with torch.device(META):
                super().__init__(  # type: ignore[no-untyped-call]  # bitsandbytes gives it no annotations
                    in_features,
                    out_features,
                    bias=bias,
                    compute_dtype=torch.bfloat16,
                    compress_statistics=double,
                    quant_type="nf4",
                )
            weight: Any = self.weight.data
            self.weight = None  # type: ignore[assignment]  # released before it is packed
            self.weight = quantized(self, weight.to(torch.bfloat16), double)

    return Packed


def main() -> None:
    """Predict for each of the settings on standard input."""
    sys.path.insert(0, sys.argv[1])
    for run in json.load(sys.stdin):
        began = time.process_time()
        try:
            answer: dict[str, Any] = {"peaks": predict(run)._asdict()}
        except Exception as error:
            answer = {"refused": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": run["id"], **answer, "cpu_seconds": round(time.process_time() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
