"""Adapters on FLUX.2-klein 4B, as PEFT's method_comparison/image-gen/run.py trains them at 5d602fd.

diffusers makes the transformer and PEFT the adapters; the loop is our own code for what run.py holds: batches of two
512 × 512 images from cached latents and prompts, checkpointing, AdamW, no autocast. Text encoder and VAE are gone when
training begins; DINOv2 and the caches are there all the time. The allocator's cache is emptied before the first step.
"""

import dataclasses
from typing import Any
from unittest import mock

import diffusers
import peft
import torch
import transformers
from diffusers import Flux2KleinPipeline

from peakmem import StandIn
from peakmem.cards import CARDS
from studies.outside.others.measure import AFTER_STEP, META, TRAIN, Peaks, numbers, peaks, to_card

# The hub's config, rebuilt from the published number of parameters.
SHAPE = {
    "patch_size": 1,
    "in_channels": 128,
    "num_layers": 5,
    "num_single_layers": 20,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
ROWS, CACHED, TEXT, SIDE = 2, 14, 512, 32  # images of a batch and of the caches; tokens of a prompt; latents of a side
STEPS = 3
AT_START = 2 << 20  # bytes that utils.py takes off: what was reserved before the model came


def predict(run: dict[str, Any]) -> Peaks:
    """Return what is predicted for a run of the settings; raises ValueError if its adapter has another size here."""

    if run["peft_config"] and run["peft_config"]["peft_type"] == "FROD":
        raise ValueError("its decomposition of every weight on the CPU takes minutes and more memory than was at hand")

    def train(recorder: StandIn) -> None:
        training, adapter = run["train_config"], run["peft_config"]
        with recorder.paused():
            with torch.device(META):
                model: Any = diffusers.Flux2Transformer2DModel(**SHAPE).to(torch.bfloat16)
                judge = transformers.Dinov2Model(transformers.Dinov2Config(image_size=518))
            model.enable_gradient_checkpointing()
            if adapter:
                model = peft.get_peft_model(
                    model, _config(adapter), autocast_adapter_dtype=training["autocast_adapter_dtype"]
                )
        to_card(judge)
        to_card(model)
        trainable = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        if trainable != run["trainable_params"]:
            raise ValueError(f"{trainable:,} trainable parameters, the run has {run['trainable_params']:,}")
        optimizer = getattr(torch.optim, training["optimizer_type"])(model.parameters(), **training["optimizer_kwargs"])
        model.train()
        _train(recorder, model, optimizer, training["repeats"], adapter)

    # VB-LoRA refuses infinite logits, and the stand-in reads a mask that it does not know as all true.
    with mock.patch.object(torch.Tensor, "isinf", lambda x: torch.zeros(x.shape, dtype=torch.bool).to(x.device)):
        found = peaks(train, CARDS["l40s"].gpu, TRAIN)
    return found._replace(reserved=found.reserved - AT_START, alive=found.alive - AT_START)


def _train(
    recorder: StandIn,
    model: Any,
    optimizer: torch.optim.Optimizer,
    repeats: int,
    adapter: dict[str, Any] | None,
) -> None:
    """Run the steps in one frame, in which a name keeps its tensor until it gets a new one."""
    order = numbers(CACHED * repeats)
    prompts = torch.empty((CACHED, TEXT, SHAPE["joint_attention_dim"]), dtype=torch.bfloat16, device=META)
    places = numbers(CACHED, TEXT, 4)
    images = torch.empty((CACHED, 128, SIDE, SIDE), dtype=torch.bfloat16, device=META)
    losses = []
    for step in range(1, STEPS + 1):
        with torch.profiler.record_function(TRAIN):
            rows = order[ROWS * (step - 1) : ROWS * step]
            latents, prompt, text_ids = (cache.index_select(0, rows) for cache in (images, prompts, places))
            image_ids = numbers(ROWS, SIDE * SIDE, 4)
            noise = torch.randn_like(latents)
            times, sigmas = torch.ones(ROWS).to(META), torch.ones((ROWS, 1, 1, 1), dtype=latents.dtype).to(META)
            noisy = (1.0 - sigmas) * latents + sigmas * noise
            packed = Flux2KleinPipeline._pack_latents(noisy)
            optimizer.zero_grad(set_to_none=True)
            predicted = model(
                hidden_states=packed,
                timestep=times / 1000,
                guidance=None,
                encoder_hidden_states=prompt,
                txt_ids=text_ids,
                img_ids=image_ids,
                return_dict=False,
            )[0]
            predicted = predicted[:, : packed.size(1)]
            predicted = predicted.permute(0, 2, 1).reshape(latents.shape).contiguous()
            weights = torch.ones_like(sigmas)
            target = noise - latents
            squares = weights.float() * (predicted.float() - target.float()) ** 2
            loss = torch.mean(squares.reshape(ROWS, -1), 1).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if adapter and adapter["peft_type"] == "ADALORA":
                model.base_model.update_and_allocate(step)
            losses.append(loss.detach())
        recorder.mark(AFTER_STEP)


def _config(adapter: dict[str, Any]) -> peft.PeftConfig:
    """Return the adapter's settings; AdaLoRA's ranks are what training ended with, and are left out."""
    kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(adapter["peft_type"])]
    known = {field.name for field in dataclasses.fields(kind) if field.init} - {"peft_type"}
    settings = {key: value for key, value in adapter.items() if key in known}
    if adapter["peft_type"] == "ADALORA":
        settings["rank_pattern"] = None
    return kind(**settings)
