"""xMem's loop (exp/trainer/train_loop.py): models from configs in float32, four batches, optimizers of torch.

The models are transformers' and torchvision's own, the loop is our own code of it. Rows have 128 tokens. The process
holds CUDA's context beside the allocator's segments: `CONTEXT`, assumed before any figure was seen. What cuDNN's
convolutions work in is not known here, so that convolutional models are predicted without it.
"""

from typing import Any

import torch
import torchvision
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from peakmem import StandIn
from peakmem.cards import Gpu
from studies.outside.others.measure import META, Peaks, numbers, peaks, to_card

CARDS = {  # NVIDIA's specifications
    "RTX 3060": Gpu((8, 6), 28),
    "RTX 4060": Gpu((8, 9), 24),
    "A100-SXM4-40GB": Gpu((8, 0), 108),
}
CONTEXT = {"RTX 3060": 230 << 20, "RTX 4060": 200 << 20, "A100-SXM4-40GB": 430 << 20}
TOKENS, SIDE, BATCHES = 128, 86, 4
NOT_SAID = 1  # zero_grad_mode, where the record says none: the trainer's default
IMAGES = {
    "ConvNeXtTiny": "convnext_tiny",
    "ConvNeXtBase": "convnext_base",
    "MnasNet": "mnasnet1_0",
    "MobeNetV3Large": "mobilenet_v3_large",
}
SHAPES: dict[str, dict[str, Any]] = {  # of the published configs
    "EleutherAI/gpt-neo-125M": {
        "model_type": "gpt_neo",
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "attention_types": [[["global", "local"], 6]],
        "attention_dropout": 0,
        "embed_dropout": 0,
        "resid_dropout": 0,
    },
    "cerebras/Cerebras-GPT-111M": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 10,
        "n_head": 12,
        "n_inner": 3072,
        "n_positions": 2048,
        "activation_function": "gelu",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "distilbert/distilgpt2": {"model_type": "gpt2", "n_embd": 768, "n_layer": 6, "n_head": 12},
    "T5-small": {"model_type": "t5", "d_model": 512, "d_ff": 2048, "num_layers": 6, "decoder_start_token_id": 0},
    "Qwen/Qwen3-4B": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "google/gemma-2-2b-it": {"model_type": "gemma2", "num_hidden_layers": 26, "vocab_size": 256000},
    "meta-llama/Llama-3.2-3B-Instruct": {
        "model_type": "llama",
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
}


def predict(run: dict[str, Any]) -> Peaks:
    """Return what is predicted for a run; `reserved` is the process's memory, context included."""
    mode = NOT_SAID if run["zero_grad_mode_recorded"] is None else run["zero_grad_mode_recorded"]
    rows, images = run["batch_size"], run["model"] in IMAGES

    def train(recorder: StandIn) -> None:
        with recorder.paused(), torch.device(META):
            model = getattr(torchvision.models, IMAGES[run["model"]])() if images else _transformer(run["model"])
        model.train()
        to_card(model)
        if not images:
            model.tie_weights()
        optimizer = _optimizer(run["optimizer"], model)
        for _ in range(BATCHES):
            if mode == 0:
                optimizer.zero_grad()
            if images:
                pixels, classes = torch.zeros((rows, 3, SIDE, SIDE)).to(META), numbers(rows)
                out = model(pixels)
                loss = torch.nn.functional.cross_entropy(out, classes)
            else:
                out = model(**_batch(rows))
                loss = out.loss
            if mode == 1:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if mode == 2:
                optimizer.zero_grad()

    found = peaks(train, CARDS[run["gpu"]])
    return found._replace(reserved=found.reserved + CONTEXT[run["gpu"]])


def _transformer(name: str) -> Any:
    """Return a model of its family's class, in float32."""
    shape = dict(SHAPES[name])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    kind: Any = AutoModelForSeq2SeqLM if config.model_type == "t5" else AutoModelForCausalLM
    return kind.from_config(config, dtype=torch.float32)


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "Adafactor":
        return transformers.optimization.Adafactor(model.parameters(), lr=0.001, relative_step=False)
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    return kind(model.parameters(), lr=0.001)  # type: ignore[call-arg]  # all of them have a rate


def _batch(rows: int) -> dict[str, torch.Tensor]:
    """Return a batch of which a row has all tokens and the others are padded."""
    mask = torch.ones((rows, TOKENS), dtype=torch.int64)
    mask[1:, TOKENS * 3 // 4 :] = 0
    return {"input_ids": numbers(rows, TOKENS), "attention_mask": mask.to(META), "labels": numbers(rows, TOKENS)}
