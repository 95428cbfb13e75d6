"""The runs on a Tesla T4 and on an RTX 4080 as settings of a rehearsal, and what is predicted for each.

fitcheck-llm's runs are full rows of random tokens. On a T4 they compute in float16, or in float32 on an NF4 base: peft
casts everything that is not packed, and bitsandbytes computes in the type of its input. The runs of
can-i-finetune-this do the same on an RTX 4080 with bfloat16 and paged 8-bit AdamW.
"""

from typing import Any, NamedTuple

import torch

from bench.reading import read
from peakmem.cards import SMALL_WORKSPACE, Gpu
from peakmem.depth import deepen
from peakmem.events import DEPTHS, Work
from peakmem.replaying import replay
from studies.outside.adapter_step import BACKWARD, FORWARD, OPTIMIZER, STEP, Setting, rehearse
from studies.outside.depths import work_of_step
from studies.paths import OUTSIDE

T4 = Gpu((7, 5), 40)  # NVIDIA T4 data sheet
RTX4080 = Gpu((8, 9), 76)  # NVIDIA Ada GPU architecture white paper
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
QWEN = {
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "3B": (2048, 36, 16, 2, 11008, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
}
PHASES = {"forward": f"{STEP}/{FORWARD}", "backward": f"{STEP}/{BACKWARD}", "optimizer": f"{STEP}/{OPTIMIZER}"}


class Predicted(NamedTuple):
    """What is predicted for a run: bytes at the peaks, and the work of one step."""

    allocated: int
    reserved: int
    phases: dict[str, int]  # peaks of allocated memory
    work: Work


def t4_runs() -> list[dict[str, Any]]:
    """Return fitcheck-llm's measured runs; those of its first session get their model's shape from later ones."""
    runs: list[dict[str, Any]] = read(OUTSIDE / "fitcheck-t4.json", dict[str, Any])["runs"]
    shapes = {run["model_id"]: run["model_config"] for run in runs if run["model_config"]}
    return [{**run, "model_config": shapes[run["model_id"]]} for run in runs]


def t4_setting(run: dict[str, Any]) -> Setting:
    """Return the setting of one of fitcheck-llm's runs: a step for warming up, one that is measured, one by phases."""
    options, model = run["run"], run["model_config"]
    name = run["model_id"].lower()
    shape = {
        "model_type": "qwen2" if "qwen" in name else "mistral" if "mistral" in name else "llama",
        "num_hidden_layers": model["num_layers"],
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["intermediate_size"],
        "num_attention_heads": model["num_attention_heads"],
        "num_key_value_heads": model["num_kv_heads"],
        "head_dim": model["head_dim"],
        "vocab_size": model["vocab_size"],
        "tie_word_embeddings": model["tie_word_embeddings"],
        "max_position_embeddings": 32768,
    }
    if shape["model_type"] == "mistral":
        shape["sliding_window"] = None
    return Setting(
        shape,
        T4,
        torch.float16,
        options["quantization"],
        options["attn_impl"],
        options["lora_rank"],
        tuple(options["lora_targets"]),
        options["batch_size"],
        options["seq_len"],
        steps=3,
        optimizer="adamw",
        checkpointing=options["grad_checkpoint"],
        expands_heads=options["attn_impl"] == "sdpa",
    )


def rtx4080_setting(run: dict[str, Any]) -> Setting:
    """Return the setting of one of can-i-finetune-this's runs."""
    options = run["config"]
    name = options["model_id"]
    if "gpt2" in name:
        shape: dict[str, Any] = {
            "model_type": "gpt2",
            "num_hidden_layers": 2,
            "hidden_size": 2,
            "num_attention_heads": 2,
            "vocab_size": 50257,
            "max_position_embeddings": 1024,
        }
    else:
        hidden, layers, heads, groups, inner, vocabulary, tied = QWEN[name.split("-")[1]]
        shape = {
            "model_type": "qwen2",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "vocab_size": vocabulary,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 32768,
        }
    return Setting(
        shape,
        RTX4080,
        torch.bfloat16,
        "nf4 with double quantization" if options["method"] == "qlora" else "none",
        "sdpa",
        options["lora_rank"],
        ("c_attn",) if shape["model_type"] == "gpt2" else PROJECTIONS,
        options["micro_batch_size"],
        options["seq_len"],
        steps=options["steps"],
        optimizer="paged_adamw_8bit",
        checkpointing=options["gradient_checkpointing"],
        clears_after=True,
    )


def predict(setting: Setting) -> Predicted:
    """Return what is predicted for a run. The first step of fitcheck-llm's is not measured."""
    few, more = (rehearse(setting, depth) for depth in DEPTHS)
    layers = setting.shape["num_hidden_layers"]
    held = replay(deepen(few.events, more.events, layers).events, expandable=False, workspace=SMALL_WORKSPACE)
    steps = setting.steps if setting.clears_after else setting.steps - 1
    whole = held["" if setting.clears_after else STEP]  # the other script's peak covers loading too
    return Predicted(
        whole.allocated,
        held[""].reserved,
        {name: held[phase].allocated for name, phase in PHASES.items()},
        work_of_step(few.work[STEP], more.work[STEP], layers, steps),
    )
