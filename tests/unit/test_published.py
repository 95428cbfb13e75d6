"""The guides' figures, entered twice: in published.yaml, and here by heading of the guide. Both must say the same."""

import re
from collections import Counter
from pathlib import Path

import pytest

from rlhf import recipe

ROOT = Path(__file__).parents[2]
DIRECTORIES = recipe.available(ROOT / "recipes")
DERIVED = re.compile(
    r"peak_vram_gb|hours|cost_usd|adapter_gb|merged_model_gb|base_model_gb"
    r"|component_gb\.(base|adapters|optimizer|activations|kv_cache)"
    r"|effect\.(gradient_checkpointing|quantization|flash_attention|batch_size|context_length|distributed|combined)"
    r"\.(memory_gb|memory_percent|time_percent|time_factor)"
)
STEPS_4090 = ("Step 1, SFT Training", "Step 2, Reward Model", "Step 3, PPO RLHF Optimization")
PIPELINE = {"Training Pipeline", *STEPS_4090, "Memory Usage Breakdown", "Training Metrics Timeline"}
H100 = {"Overview", "Hardware and Cost", "RLHF Architecture", "Step 1", "Step 2", "Step 3", "Step 4", "Step 5"}
H100 |= {"VRAM Optimization Strategies", "Training Tips and Tricks", "Troubleshooting Guide", "FAQ"}
GUIDES = {"RTX 4090 pipeline": PIPELINE, "H100 guide": H100}

# (heading, low, high, unit) of every figure, as the guides print them: percentages of accuracy as fractions, MB as GB.
FIGURES = {
    "4090-llama2-7b": [
        ("Training Pipeline", 160_000, 160_000, "pairs"),
        ("Training Pipeline", 20_000, 20_000, "examples"),
        ("Training Pipeline", 50_000, 50_000, "pairs"),
        ("Training Pipeline", 20_000, 20_000, "prompts"),
        ("Step 1, SFT Training", 3.3, 4.5, "perplexity"),
        ("Step 1, SFT Training", 18, 20, "GB"),
        ("Step 1, SFT Training", 2, 4, "hours"),
        ("Step 1, SFT Training", 0.05, 0.05, "GB"),
        ("Step 2, Reward Model", 0.7, None, "fraction"),
        ("Step 2, Reward Model", 20, 22, "GB"),
        ("Step 2, Reward Model", 3, 6, "hours"),
        ("Step 3, PPO RLHF Optimization", 0, None, "standard deviations of SFT's scores"),
        ("Step 3, PPO RLHF Optimization", 0.1, 0.3, "nats per token"),
        ("Step 3, PPO RLHF Optimization", 22, 24, "GB"),
        ("Step 3, PPO RLHF Optimization", 6, 12, "hours"),
        ("Step 3, PPO RLHF Optimization", 1000, 1000, "steps"),
        ("Memory Usage Breakdown", 3.5, 3.5, "GB"),
        ("Memory Usage Breakdown", 0.05, 0.05, "GB"),
        ("Memory Usage Breakdown", 8, 10, "GB"),
        ("Memory Usage Breakdown", 6, 8, "GB"),
        ("Memory Usage Breakdown", 2, 4, "GB"),
        ("Memory Usage Breakdown", 18, 24, "GB"),
        ("Memory Usage Breakdown", None, 24, "GB"),
        ("Training Metrics Timeline", 4, 4, "hours"),
        ("Training Metrics Timeline", 6, 6, "hours"),
        ("Training Metrics Timeline", 12, 12, "hours"),
        ("Training Metrics Timeline", 22, 22, "hours"),
        ("Training Metrics Timeline", 2.5, 2.5, "nats per token"),
        ("Training Metrics Timeline", 1.2, 1.2, "nats per token"),
        ("Training Metrics Timeline", 0.69, 0.69, "nats per pair"),
        ("Training Metrics Timeline", 0.35, 0.35, "nats per pair"),
        ("Training Metrics Timeline", 12, 12, "perplexity"),
        ("Training Metrics Timeline", 3.3, 3.3, "perplexity"),
        ("Training Metrics Timeline", 0.5, 0.5, "fraction"),
        ("Training Metrics Timeline", 0.72, 0.72, "fraction"),
        ("Training Metrics Timeline", 2, 2, "raw score"),
        ("Training Metrics Timeline", 8, 8, "raw score"),
        ("Training Metrics Timeline", 0.05, 0.05, "nats per token"),
        ("Training Metrics Timeline", 0.25, 0.25, "nats per token"),
    ],
    "h100-mistral-7b": [
        ("Overview", None, 80, "GB"),  # a single H100, 80 GB, fits 7B
        ("Overview", 70, 70, "billion parameters"),
        ("Overview", 1.99, 1.99, "USD per hour"),
        ("Overview", 24, 24, "hours"),
        ("Overview", 47.76, 47.76, "USD"),
        ("Overview", 330_000, 330_000, "USD"),
        ("Overview", 6.8, 6.8, "years"),
        ("Hardware and Cost", 80, 80, "GB"),
        ("Hardware and Cost", 128, None, "GB"),
        ("Hardware and Cost", 256, 256, "GB"),
        ("Hardware and Cost", 100, None, "GB"),
        ("Hardware and Cost", 10, None, "Gbit/s"),
        ("Hardware and Cost", 1.99, 1.99, "USD per hour"),
        ("Hardware and Cost", 2.86, 2.86, "USD per hour"),
        ("Hardware and Cost", 14, 14, "GB"),
        ("Hardware and Cost", 28, 28, "GB"),
        ("Hardware and Cost", 18, 18, "GB"),
        ("Hardware and Cost", 1, 1, "GB"),
        ("Hardware and Cost", 61, 61, "GB"),
        ("RLHF Architecture", 1000, 10_000, "examples"),
        ("RLHF Architecture", 45, 45, "GB"),
        ("RLHF Architecture", 2, 8, "hours"),
        ("RLHF Architecture", 1000, 10_000, "pairs"),
        ("RLHF Architecture", 30, 30, "GB"),
        ("RLHF Architecture", 1, 4, "hours"),
        ("RLHF Architecture", 70, 70, "GB"),
        ("RLHF Architecture", 8, 24, "hours"),
        ("RLHF Architecture", 40, 40, "GB"),
        ("RLHF Architecture", 2, 6, "hours"),
        ("Step 1", 1000, None, "pairs"),
        ("Step 1", 10_000, None, "pairs"),
        ("Step 1", 0.5, 0.5, "USD per pair"),
        ("Step 2", 1, 5, "score"),
        ("Step 2", 0, 1, "squashed score"),
        ("Step 2", 5000, 10_000, "pairs"),
        ("Step 3", 75, 75, "GB"),
        ("Step 3", 1000, 5000, "steps"),
        ("Step 5", 14, 14, "GB"),  # base
        ("Step 5", 0.05, 0.05, "GB"),
        ("Step 5", 14, 14, "GB"),  # merged
        ("VRAM Optimization Strategies", -30, -20, "percent"),
        ("VRAM Optimization Strategies", 10, 20, "percent"),
        ("VRAM Optimization Strategies", -10.5, -10.5, "GB"),  # 75 % of 14 GB
        ("VRAM Optimization Strategies", 5, 10, "percent"),
        ("VRAM Optimization Strategies", None, 0, "percent"),  # flash attention: memory
        ("VRAM Optimization Strategies", None, 0, "percent"),  # flash attention: time
        ("VRAM Optimization Strategies", -10, -10, "GB"),
        ("VRAM Optimization Strategies", 2, 2, "times"),
        ("VRAM Optimization Strategies", -30, -30, "percent"),
        ("VRAM Optimization Strategies", None, 0, "percent"),  # several GPUs
        ("Training Tips and Tricks", 0, None, "standard deviations of SFT's scores"),
        ("Training Tips and Tricks", None, 3.466, "nats per token"),  # 5 bits
        ("Training Tips and Tricks", None, 0, "change of loss"),
        ("Troubleshooting Guide", None, 80, "GB"),
        ("Troubleshooting Guide", 0.3, 0.7, "squashed score"),
        ("FAQ", 12, 36, "hours"),
        ("FAQ", 5, 18, "hours"),
        ("FAQ", 8, 8, "H100 GPUs"),
        ("FAQ", 100, None, "pairs"),
        ("FAQ", None, 50, "pairs"),
        ("FAQ", 1_000_000, 1_000_000, "pairs"),
        ("FAQ", 160_000, 160_000, "pairs"),
        ("FAQ", 64_000, 64_000, "pairs"),
        ("FAQ", 0.9, 0.9, "fraction"),
    ],
    "h100-mistral-7b-4bit": [
        ("Hardware and Cost", -50, -50, "percent"),
        ("Hardware and Cost", 3.5, 3.5, "GB"),
        ("Hardware and Cost", 21, 21, "GB"),
        ("Hardware and Cost", 15, 15, "GB"),
        ("Hardware and Cost", 40, 40, "GB"),
        ("Hardware and Cost", 1, 3, "percent"),
    ],
    "4090-mistral-7b": [
        ("VRAM Optimization Strategies", 20, 20, "GB"),
        ("VRAM Optimization Strategies", 3, 4, "times"),
    ],
    "h100-llama2-13b": [
        ("Overview", None, 80, "GB"),
        ("FAQ", None, 80, "GB"),
    ],
}

SHARED_BY_H100 = {
    "lora.r": 32,
    "lora.lora_alpha": 64,
    "lora.lora_dropout": 0.05,
    "lora.target_modules": ("q_proj", "v_proj"),
    "sft.learning_rate": 1e-4,
    "sft.num_train_epochs": 3,
    "rm.learning_rate": 1e-4,
    "rm.num_train_epochs": 3,
    "rm.loss_type": "margin_ranking",
    "rm.margin": 0.5,
    "ppo.steps": 1000,
    "ppo.learning_rate": 1e-5,
    "ppo.batch_size": 16,
    "ppo.num_mini_batches": 4,
    "ppo.num_ppo_epochs": 4,
    "ppo.response_length": 128,
    "ppo.temperature": 0.7,
    "ppo.sigmoid_scores": True,
    "ppo.normalize_scores": False,
    "ppo.keep_checkpoints": "all",
    "dpo.learning_rate": 5e-4,
    "dpo.beta": 0.1,
    "dpo.num_train_epochs": 3,
    "dpo.per_device_train_batch_size": 4,
    "dpo.gradient_accumulation_steps": 2,
    "evaluate.temperature": 0.7,
    "evaluate.top_p": 0.9,
}
# What the guides give as a setting stands in v1 as they give it.
SETTINGS = {
    "4090-llama2-7b": {
        "hardware.name": "4090",
        "model.name": "meta-llama/Llama-2-7b-hf",
        "model.quantization": "nf4",
        "data.name": "Anthropic/hh-rlhf",
        "lora.r": 16,
        **{f"{stage}.optim": "paged_adamw_8bit" for stage in ("sft", "rm", "ppo")},
        **{f"{stage}.gradient_checkpointing": True for stage in ("sft", "rm", "ppo")},
        "sft.max_samples": 20_000,
        "rm.max_samples": 50_000,
        "rm.loss_type": "bradley_terry",
        "ppo.max_samples": 20_000,
        "ppo.steps": 1000,
    },
    "h100-mistral-7b": SHARED_BY_H100
    | {
        "hardware.name": "h100",
        "model.name": "mistralai/Mistral-7B-v0.1",
        "model.quantization": "none",
        "sft.max_length": 512,
        "rm.max_length": 512,
        "dpo.max_length": 512,
        "dpo.max_prompt_length": 256,
        "evaluate.response_length": 256,
    },
    "h100-mistral-7b-4bit": SHARED_BY_H100 | {"hardware.name": "h100", "model.quantization": "nf4"},
    "4090-mistral-7b": SHARED_BY_H100
    | {
        "hardware.name": "4090",
        "model.quantization": "nf4",
        **{f"{stage}.per_device_train_batch_size": 4 for stage in ("sft", "rm", "ppo", "dpo")},
        **{f"{stage}.gradient_checkpointing": True for stage in ("sft", "rm", "ppo", "dpo")},
        **{f"{stage}.max_length": 256 for stage in ("sft", "rm", "dpo")},
        "ppo.max_prompt_length": 128,
    },
    "h100-llama2-13b": SHARED_BY_H100 | {"hardware.name": "h100", "model.quantization": "nf4"},
}


def known(stage: str) -> set[str]:
    """Keys of a stage's summary and metrics.jsonl: those that its file writes or docs/metrics.md explains."""
    written = "".join((ROOT / f"rlhf/{name}.py").read_text() for name in (f"stages/{stage}", "evaluation"))
    explained = (ROOT / "docs/metrics.md").read_text()
    return {*re.findall(r'"([a-z_/]+)":', written), *re.findall(r"`([a-z_]+(?:/[a-z_]+)*)`", explained)}


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda d: f"{d.parent.name}-{d.name}")
def test_every_row_names_its_place_and_what_it_is_compared_with(directory):
    loaded = recipe.load(directory)
    assert loaded.targets
    for target in loaded.targets:
        guide, *place = target.source.split(" > ")
        if directory.parent.name in FIGURES:
            assert guide in GUIDES and place[0] in GUIDES[guide] and len(place) == 2, target.source
        if target.metric is None:
            assert len(target.not_comparable.split()) >= 3, target.name
        elif not DERIVED.fullmatch(target.metric):
            assert target.stage != "all", target.name
            assert re.sub(r"^((first|last)\.|(base|sft|ppo|dpo)/)", "", target.metric) in known(target.stage), (
                target.metric
            )


def test_every_recipe_of_a_guide_is_checked():
    ours = {"cpu-tiny", "2xcpu-tiny", "2x4090-llama2-13b", "8xh100-llama2-70b"}
    assert {d.parent.name for d in DIRECTORIES} - ours == set(FIGURES) == set(SETTINGS)


@pytest.mark.parametrize(
    "directory", [d for d in DIRECTORIES if d.name != "v1" and d.parent.name in FIGURES], ids=lambda d: d.parent.name
)
def test_a_later_version_is_held_against_the_same_figures(directory):
    assert recipe.load(directory).targets == recipe.load(directory.with_name("v1")).targets


@pytest.mark.parametrize("name", FIGURES)
def test_the_guides_figures_are_all_there_and_nothing_else(name):
    targets = recipe.load(ROOT / "recipes" / name / "v1").targets
    rows = Counter((target.source.split(" > ")[1], *target.range, target.unit) for target in targets)
    expected = Counter(FIGURES[name])
    assert not expected - rows, "figures of the guide that published.yaml lacks"
    assert not rows - expected, "rows of published.yaml that the guide does not have"


@pytest.mark.parametrize("name", SETTINGS)
def test_v1_keeps_the_guides_settings(name):
    content = recipe.load(ROOT / "recipes" / name / "v1").recipe.model_dump()
    found = {key: content[key.split(".")[0]][key.split(".")[1]] for key in SETTINGS[name]}
    assert found == SETTINGS[name]
