"""Vision transformers that others fine-tune: torchvision's ViT-L/16, timm's ViT-g and ViT-H.

The models are the packages' own. The loops are our own code for what the scripts hold: rasbt's pytorch-memory-optim at
f6eddcd, and torchao's benchmarks/benchmark_low_bit_adam.py, whose first version crops images to 224 pixels.
"""

import contextlib
from typing import Any

import bitsandbytes as bnb
import timm
import torch
import torch.nn.functional as F
import torchvision

from peakmem import StandIn
from peakmem.cards import CARDS, Gpu
from studies.outside.others.measure import META, Peaks, numbers, peaks, to_card

RTX_4070_TI_SUPER = Gpu((8, 9), 66)  # NVIDIA GeForce RTX 4070 Ti SUPER specifications: 8,448 CUDA cores
CLASSES = 45
COMPILED = "torch.compile: what Inductor's kernels keep is not known without compiling for a card"


def rasbt(run: dict[str, Any]) -> Peaks:
    """Return what is predicted for one of the scripts; it says no card, and an A100 is assumed."""
    mixed = run["precision"].startswith("16-mixed")
    dtype = torch.bfloat16 if run["precision"] == "bf16-true" else torch.float32
    rows, accumulation = run["batch_size"], run["accumulation"]

    def train(recorder: StandIn) -> None:
        with recorder.paused(), torch.device(META):
            model = torchvision.models.vit_l_16()
            model.heads.head = torch.nn.Linear(1024, 10)
        to_card(model, dtype)
        kind = torch.optim.Adam if run["optimizer"] == "Adam" else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=5e-5)
        for step in range(2 * accumulation + 1):
            model.train()
            features, targets = torch.zeros((rows, 3, 224, 224)).to(META), numbers(rows)
            with _autocast(mixed):
                logits = model(features.to(dtype)).float()
            loss = F.cross_entropy(logits, targets) / accumulation
            if accumulation == 1:
                optimizer.zero_grad()
            loss.backward()
            if step % accumulation == 0:
                optimizer.step()
                if accumulation > 1:
                    optimizer.zero_grad()
            model.eval()
        with torch.no_grad(), _autocast(mixed):
            model(features.to(dtype))

    return peaks(train, CARDS["a100"].gpu)


def torchao(run: dict[str, Any]) -> Peaks:
    """Return what is predicted for a run without torch.compile; raises ValueError for the others."""
    if run["compile"] is True:
        raise ValueError(COMPILED)
    optimizer = run["optim"]
    if run["id"].startswith("llama"):
        raise ValueError("a script of a pull request, not at hand")
    if any(name in optimizer for name in ("ao 8", "ao 4", "lpmm")):
        raise ValueError("an optimizer whose package is not at hand")
    giant, mixed = "giant" in run["model"], "AMP" in run["dtype"]
    name = "vit_giant_patch14_dinov2.lvd142m" if giant else "vit_huge_patch14_224.orig_in21k"
    size = {"img_size": 224} if giant else {}

    def train(recorder: StandIn) -> None:
        with recorder.paused(), torch.device(META):
            model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **size)
        if run["checkpoint_activations"]:
            model.set_grad_checkpointing()
        to_card(model, None if mixed else torch.bfloat16)
        step = _step(model, optimizer, run["offload"])
        model.train()
        for _ in range(3):
            images = torch.zeros((run["batch_size"], 3, 224, 224), dtype=torch.float32 if mixed else torch.bfloat16)
            with _autocast(mixed):
                loss = F.cross_entropy(model(images.to(META)), numbers(run["batch_size"]))
            loss.backward()
            step()

    return peaks(train, RTX_4070_TI_SUPER)


def _step(model: Any, optimizer: str, offload: str | None) -> Any:
    """Return what updates the weights and drops gradients; states that are offloaded leave the card alone."""
    if offload == "states and gradients":  # each goes as soon as it is on the host, at the earliest
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    if offload:
        return model.zero_grad
    own: Any = bnb.optim.AdamW8bit(model.parameters()) if "bnb" in optimizer else None
    states = own or torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        states.step()
        states.zero_grad()

    return step


def _autocast(mixed: bool) -> contextlib.AbstractContextManager[Any]:
    """Return autocast to 16 bits: of bfloat16, which float16 equals in size."""
    return torch.autocast("meta", torch.bfloat16) if mixed else contextlib.nullcontext()
