"""What a comparison with a figure says; and the guides' figures, entered twice: in published.yaml, and here by heading.

Both entries must say the same.
"""

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.evaluation import reproduce
from rlhf.recipe import StageName, published, totals
from rlhf.recipe.chain import differences
from rlhf.recipe.plain_yaml import read_yaml
from rlhf.recipe.published import Figure, verdict_of
from rlhf.recipe.shared import BLOCK
from rlhf.recipe.stages import TRAINING_STAGES
from rlhf.recipe.totals import Spent
from rlhf.run import records
from rlhf.run.records import Comparison
from rlhf.stages.runner import import_stage
from tests.records import summary_of

ROOT = Path(__file__).parents[2]
DIRECTORIES = recipe.available(ROOT / "recipes")
DERIVED = re.compile(
    r"peak_vram_gb|hours|cost_usd|card_usd|break_even_years|adapter_gb|merged_model_gb|base_model_gb"
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
FIGURES: dict[str, list[tuple[str, float | None, float | None, str]]] = {
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
        ("VRAM Optimization Strategies", 3, 4, "times"),
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
    "ppo.vf_coef": 0.1,
    "ppo.adam_epsilon": 1e-8,
    "ppo.keep_checkpoints": "all",
    "ppo.best_kl_limit": 3.466,
    "ppo.adapter": "best",
    "tokenizer.template": "plain",
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
        **{f"{stage}.gradient_checkpointing": False for stage in ("sft", "rm", "ppo", "dpo")},
        "sft.per_device_train_batch_size": 16,
        "sft.gradient_accumulation_steps": 1,
        "sft.max_length": 512,
        "rm.max_length": 512,
        "dpo.max_length": 512,
        "dpo.max_prompt_length": 256,
        "dpo.max_completion_length": 256,
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


def known(stage: StageName) -> set[str]:
    """Keys of a stage's summary and metrics.jsonl: those that its file writes or docs/metrics.md explains."""
    files = (inspect.getfile(import_stage(stage)), ROOT / "rlhf/evaluation/policies.py")
    written = "".join(Path(file).read_text() for file in files)
    explained = (ROOT / "docs/metrics.md").read_text()
    return {*re.findall(r'"([a-z_/]+)":', written), *re.findall(r"`([a-z_]+(?:/[a-z_]+)*)`", explained)}


# Recipes of `rlhf new`, which no one has published figures for.
WITHOUT_FIGURES = {
    "12gb-qwen3-4b",
    "4090-qwen3-14b",
    "4090-qwen3-8b",
    "8gb-qwen3-1.7b",
    "h100-llama33-70b",
    "h100-qwen3-32b",
    "h100-qwen3-8b",
}


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda d: f"{d.parent.name}-{d.name}")
def test_every_row_names_its_place_and_what_it_is_compared_with(directory):
    loaded = recipe.load(directory)
    assert bool(loaded.figures) == (loaded.name not in WITHOUT_FIGURES)
    for target in loaded.figures:
        guide, *place = target.source.split(" > ")
        if directory.parent.name in FIGURES:
            assert guide in GUIDES and place[0] in GUIDES[guide] and len(place) == 2, target.source
        if target.metric is None:
            assert target.not_comparable and len(target.not_comparable.split()) >= 3, target.name
        elif not DERIVED.fullmatch(target.metric):
            assert target.stage != "all", target.name
            assert re.sub(r"^((first|last)\.|(base|sft|ppo|grpo|dpo)/)", "", target.metric) in known(target.stage), (
                target.metric
            )


def test_every_recipe_of_a_guide_is_checked():
    ours = {
        "cpu-tiny",
        "cpu-tiny-kto",
        "cpu-gemma3-sums",
        "cpu-smollm2-hh",
        "cpu-smollm2-sums",
        "cpu-smollm2-chain-sum",
        "cpu-tiny-groups",
        "cpu-tiny-sums",
        "2xcpu-tiny",
        "2x4090-llama2-13b",
        "8xh100-llama2-70b",
    }
    ours |= {"4090-qwen2.5-coder-0.5b", "4090-llama31-8b-gsm8k", "h100-llama31-8b-gsm8k", *WITHOUT_FIGURES}
    assert {d.parent.name for d in DIRECTORIES} - ours == set(FIGURES) == set(SETTINGS)


@pytest.mark.parametrize(
    "directory", [d for d in DIRECTORIES if d.name != "v1" and d.parent.name in FIGURES], ids=lambda d: d.parent.name
)
def test_a_later_version_is_held_against_the_same_figures(directory):
    """What its own settings lead to is its own, and so is the reason."""
    own = {"expected": None, "explained": None}
    later, first = (recipe.load(d).figures for d in (directory, directory.with_name("v1")))
    assert [f.model_copy(update=own) for f in later] == [f.model_copy(update=own) for f in first]


@pytest.mark.parametrize("name", FIGURES)
def test_the_guides_figures_are_all_there_and_nothing_else(name):
    targets = recipe.load(ROOT / "recipes" / name / "v1").figures
    rows = Counter((target.source.split(" > ")[1], *target.printed, target.unit) for target in targets)
    expected = Counter(FIGURES[name])
    assert not expected - rows, "figures of the guide that published.yaml lacks"
    assert not rows - expected, "rows of published.yaml that the guide does not have"


LABELS = {"default", "description"}
CHECKPOINTING = {f"{stage}.gradient_checkpointing" for stage in ("sft", "rm", "ppo", "dpo")}
MODEL = {f"{section}.{key}" for section in ("model", "tokenizer") for key in ("name", "revision")}
SHAPE = (
    *("hidden_size", "intermediate_size", "max_position_embeddings", "model_type", "sliding_window"),
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
)
GRADIENT_ACCUMULATION = "gradient_accumulation_steps"
SFT_BATCH = {"sft.per_device_train_batch_size", f"sft.{GRADIENT_ACCUMULATION}"}


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("h100-mistral-7b/v3", CHECKPOINTING),
        ("h100-mistral-7b-4bit/v1", {"model.quantization"}),
        (
            "h100-llama2-13b/v1",
            {"model.quantization", *MODEL, *(f"model.architecture.{key}" for key in SHAPE), *SFT_BATCH},
        ),
    ],
)
def test_a_variant_of_the_guides_recipe_differs_from_it_in_one_thing(name, differs):
    """So that what a comparison shows has one cause. The cards say the same."""
    guide, variant = (recipe.load(ROOT / "recipes" / which).recipe for which in ("h100-mistral-7b/v1", name))
    found = differences(guide.model_dump(), variant.model_dump())
    assert set(found) == differs | LABELS


SPEED = {
    *("hardware.trunk", "ppo.rollout_weights", "ppo.rollout_batch_size", "ppo.score_batch_size"),
    *(f"{s}.{key}" for s in ("sft", "rm", "dpo") for key in ("per_device_train_batch_size", GRADIENT_ACCUMULATION)),
    "evaluate.batch_size",
    "hardware.update_graphs",
}


def test_the_fast_version_takes_the_optimizer_steps_of_the_one_that_was_measured():
    """Only keys of speed differ, and the rows of a step do not."""
    folder = ROOT / "recipes/h100-mistral-7b"
    measured, fast = (recipe.load(folder / version).recipe for version in ("v2", "v4"))
    assert set(differences(measured.model_dump(), fast.model_dump())) == SPEED | LABELS
    for stage in ("sft", "rm", "dpo"):
        before, now = (loaded.dialogues()[stage] for loaded in (measured, fast))
        rows = [o.per_device_train_batch_size * o.gradient_accumulation_steps for o in (before, now)]
        assert rows[0] == rows[1], stage


@pytest.mark.parametrize("directory", [d for d in DIRECTORIES if "cpu-tiny" not in d.parent.name], ids=str)
def test_a_recipe_for_a_gpu_states_what_decides_its_outcome(directory):
    """Constants of the optimizers and of PPO's normalisation stand in the file, also where they are the defaults.

    A recipe with the block `training` leaves defaults out; `rlhf recipes --show` prints them.
    """
    content = read_yaml(directory / "recipe.yaml")
    if BLOCK in content:
        return
    for stage in content.keys() & {*TRAINING_STAGES}:
        assert {"weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"} <= content[stage].keys()
    if "ppo" in content:
        assert {"norm_responses", "vf_coef"} <= content["ppo"].keys()
    if "dpo" in content:
        assert "max_completion_length" in content["dpo"]


@pytest.mark.parametrize("name", SETTINGS)
def test_v1_keeps_the_guides_settings(name):
    content = recipe.load(ROOT / "recipes" / name / "v1").recipe.model_dump()
    found = {key: content[key.split(".")[0]][key.split(".")[1]] for key in SETTINGS[name]}
    assert found == SETTINGS[name]


# -- comparing ---------------------------------------------------------------------------------------------------------


def figure(metric="peak_vram_gb", guide="guide", unit="GB", stage="sft", **keys) -> Figure:
    source = "guide > page > line" if guide else "an aim"
    return Figure(name="figure", stage=stage, metric=metric, guide=guide, unit=unit, source=source, **keys)


SHARE = {"metric": "accuracy", "unit": "fraction"}
EFFECT = {"metric": "effect.quantization.memory_percent", "unit": "percent"}
EXPECTED = {"expected": 3.0, "explained": "two of them"}
LOSS = {"metric": "last.loss", "unit": "nats per token"}


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        ({"value": 61, "about": True}, 58, "met (-4.9 %)"),
        ({"value": 61, "about": True}, 19, "better (-68.9 %)"),
        ({"value": 61, "about": True}, 67.2, "missed (+10.2 %)"),
        ({"value": 45}, 58, "missed (+28.9 %)"),
        ({"value": 45}, 45.5, "met (+1.1 %)"),
        ({"value": 45}, 45.6, "missed (+1.3 %)"),
        ({"value": 20}, 24.9, "missed (+24.5 %)"),
        ({"range": (None, 80)}, 84, "missed (+5.0 %)"),
        ({"range": (None, 80)}, 12, "met"),
        ({"range": (18, 24)}, 19, "met"),
        ({"range": (18, 24)}, 9, "better (-50.0 %)"),
        ({"range": (18, 24)}, 24.1, "missed (+0.4 %)"),
        ({"range": (8, 10), "about": True}, 10.9, "met (+9.0 %)"),
        ({"value": 28}, float("nan"), "not compared: not measured"),
        ({"value": 0.05, "tolerance": "10%"}, 0.0545, "met (+9.0 %)"),
        ({"value": 47.76, "tolerance": 1}, 48.7, "met (+2.0 %)"),
        ({"value": 28}, 0.109, "better (-99.6 %)"),
        ({"value": 1.2, **LOSS}, 1.19, "met (-0.8 %)"),
        ({"value": 1.2, **LOSS}, 1.25, "met (+4.2 %)"),
        ({"value": 1.2, **LOSS}, 1.26, "missed (+5.0 %)"),
        ({"value": 1.2, **LOSS}, 1.1, "better (-8.3 %)"),
        ({"value": 2.5, **LOSS, "metric": "first.loss"}, 2.45, "met (-2.0 %)"),
        ({"value": 2.5, **LOSS, "metric": "first.loss"}, 2.3, "missed (-8.0 %)"),
        ({"value": 0.72, **SHARE}, 0.74, "better (+2 points)"),
        ({"value": 0.72, **SHARE}, 0.724, "met (+0.4 points)"),
        ({"value": 0.72, **SHARE}, 0.7, "missed (-2 points)"),
        ({"range": (0.7, None), **SHARE}, 0.69, "missed (-1 points)"),
        ({"range": (-30, -20), **EFFECT}, -77, "better (-47 points)"),
        ({"value": -10, "about": True, "metric": "effect.batch_size.memory_gb"}, -9.5, "met (+5.0 %)"),
        ({"range": (0.1, 0.3), "metric": "kl_per_token", "unit": "nats"}, 0.05, "missed (-50.0 %)"),
        ({"range": (None, 3.5), "better": "less", "metric": "kl_per_token", "unit": "nats"}, 4.2, "missed (+20.0 %)"),
        ({"range": (0, None), "metric": "score_gain_sd", "unit": "sd"}, -0.2, "missed (-0.2)"),
        ({"guide": None, "range": (None, 5), "metric": "accuracy_gap_points"}, 5.025, "missed (+0.5 %)"),
        ({"guide": None, "range": (None, 5), "metric": "accuracy_gap_points"}, 5, "met"),
        ({"guide": None, "range": (2, 4), "metric": "hours", "unit": "hours"}, 1, "met (-50.0 %)"),
        ({"guide": None, "range": (0.05, 0.3), "metric": "kl_per_token", "unit": "nats"}, 0.04, "missed (-20.0 %)"),
        ({"value": 61}, None, "not compared: not measured"),
        ({"value": 6, "metric": "component_gb.activations"}, None, "not compared: predicted only: a run measures the "
         "peak, not which part of it activations are"),
        ({"value": 1, **EXPECTED}, 3.3, "explained (+230 %; two of them)"),
        ({"value": 1, **EXPECTED}, 3.31, "missed (+231 %)"),
        ({"value": 1, **EXPECTED}, 1, "met (+0.0 %)"),
        ({"value": 2, "metric": None, "not_comparable": "a raw score"}, 2.0, "not compared: a raw score"),
    ],
)  # fmt: skip
def test_a_value_reproduces_a_figure_is_better_or_is_worse(keys, value, said):
    assert str(verdict_of(figure(**keys), value)) == said


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"range": (61, 61)}, "both ends are 61; write value: 61"),
        ({}, "either a value"),
        ({"value": 1, "range": (0, 1)}, "either a value"),
        ({"value": 1, "metric": None}, "a metric that it is compared with, or a reason"),
        ({"value": 1, "tolerance": "wide"}, "neither a number nor a percentage"),
        ({"value": 1, "tolerance": 1, "about": True}, "leave out one"),
        ({"value": 1, "expected": 3.0}, "go together"),
        ({"value": 4, **EXPECTED}, "worse than a published cost"),
        ({"value": 1, **EXPECTED, "metric": "accuracy"}, "worse than a published cost"),
        ({"range": (0, 1), **EXPECTED, "guide": None}, "worse than a published cost"),
        ({"value": 1, "guide": None}, "a target of our own"),
        ({"range": (0, 1), "range_of_mean": (0, 1)}, "targets of our own"),
        ({"value": 1, "guide": "another"}, "begins with the guide's name"),
        ({"value": 1, "metric": "component_gb.kvcache"}, "metric: component_gb.kvcache names no component of a peak"),
        (
            {"value": 1, "metric": "effect.quantization"},
            "effect.quantization is not effect.<strategy>.<memory_gb",
        ),
        ({"value": 1, "metric": "effect.quantization.memry_gb"}, "effect.quantization.memry_gb is not effect."),
    ],
)
def test_a_figure_that_says_two_things_is_refused(keys, said):
    guide = keys.pop("guide", "guide")
    row = {"name": "f", "stage": "sft", "metric": "hours", "unit": "h", "source": "guide > page > line", "guide": guide}
    with pytest.raises(ValueError, match=re.escape(said)):
        Figure.model_validate(row | keys)


def published_yaml(ends: str) -> str:
    """A published.yaml with one figure."""
    keys = "name: f, stage: sft, metric: hours, unit: h, guide: g, source: g > h > p"
    return f"targets: [{{{keys}, {ends}}}]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("targets: 3", "needs a key 'targets' with a list of figures"),
        ("targets: [3]", "needs a key 'targets' with a list of figures"),
        ("goals: 1\ntargets: []", "unknown key 'goals'"),
        (
            "targets: [{name: f, stage: sft, metric: hours, rnage: [0, 1], unit: h, source: s}]",
            "nearest: targets.0.range (docs/metrics",
        ),
        (published_yaml("range: [5, 3]"), "targets.0: range: 5 is above 3; write the lower end first"),
        (published_yaml("range: [null, null]"), "targets.0: range: both ends are open; give one of them a number"),
        (published_yaml("range: [1, 3], range_of_mean: [3, 2]"), "targets.0: range_of_mean: 3 is above 2"),
        (published_yaml("value: .nan"), "targets.0.value = nan: input should be a finite number"),
        (published_yaml("range: [.nan, 3]"), "targets.0.range.0 = nan: input should be a finite number"),
        (published_yaml("value: 3, tolerance: -0.5"), "targets.0: tolerance: -0.5 must be 0 or more, and finite"),
        (published_yaml("value: 3, tolerance: .inf"), "targets.0: tolerance: inf must be 0 or more, and finite"),
    ],
)
def test_a_mistake_in_published_yaml_is_one_line(tmp_path, text, said):
    made = tmp_path / "made" / "v1"
    made.mkdir(parents=True)
    (made / "recipe.yaml").write_text((ROOT / "recipes/cpu-tiny/v1/recipe.yaml").read_text())
    (made / "published.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        recipe.load(made)
    assert said in str(error.value) and str(made / "published.yaml") in str(error.value)
    assert "\n" not in str(error.value)


# -- several stages --------------------------------------------------------------------------------------------------

CHAIN = {"sft": Spent(58.0, 8.0), "rm": Spent(25.0, 4.0), "ppo": Spent(70.0, 20.0), "dpo": Spent(36.0, 99.0)}


def test_a_total_is_the_highest_peak_the_chain_s_hours_or_their_cost():
    assert totals.total("peak_vram_gb", CHAIN, None) == (70.0, "")
    assert totals.total("hours", CHAIN, None) == (32.0, "")
    assert totals.total("cost_usd", CHAIN, 2.0) == (64.0, "")
    assert totals.total("cost_usd", {s: spent._replace(cards=8) for s, spent in CHAIN.items()}, 2.0) == (512.0, "")
    assert totals.total("cost_usd", CHAIN, None) == (None, "needs the price of an hour (--price)")
    assert totals.total("hours", {"sft": CHAIN["sft"]}, None) == (8.0, "needs rm, ppo")
    assert totals.total("peak_vram_gb", {"sft": Spent(None, 1.0)}, None) == (None, "needs sft, rm, ppo")


def test_a_total_that_lacks_stages_is_missed_only_above_its_range():
    """SFT and the reward model took 12 hours: PPO might have taken none."""
    aim = figure("hours", guide=None, unit="hours", stage="all", range=(0.0, 12.0))
    without_ppo = {stage: CHAIN[stage] for stage in ("sft", "rm")}
    assert totals.compare_total(aim, without_ppo) == (None, published.Verdict("not compared", "needs ppo"))
    value, verdict = totals.compare_total(aim, without_ppo | {"rm": Spent(25.0, 4.1)})
    assert value == pytest.approx(12.1) and verdict.word == "missed"


def test_a_guide_s_total_counts_the_guide_s_stages():
    """The pipeline has no DPO and no evaluation; a limit of our own holds for every stage."""
    stages = CHAIN | {"evaluate": Spent(90.0, 1.0)}
    assert totals.compare_total(figure("peak_vram_gb", stage="all", range=(None, 80)), stages)[0] == 70.0
    own = figure("peak_vram_gb", guide=None, stage="all", range=(None, 80))
    assert totals.compare_total(own, stages)[0] == 90.0


def test_the_most_favourable_of_several_figures_counts():
    assert published.best(["missed", "met"]) == "met"
    assert published.best(["missed", "better"]) == "better"
    assert published.best(["missed", "not compared"]) == "not compared"
    assert published.best(["missed", "missed"]) == "missed"
    assert published.best(["missed", "explained"]) == "explained"
    assert published.best([]) is None


def test_verdicts_are_counted_in_words():
    words: list[published.VerdictWord] = ["met", "better", "met", "missed"]
    verdicts = [published.Verdict(word) for word in words]
    assert published.count(verdicts) == "2 of 4 met, 1 of 4 better, 1 of 4 missed"
    assert published.count(verdicts[2:], "targets") == "1 of 2 targets met"
    unmeasured = published.Verdict("not compared", "not measured")
    met = [published.Verdict("met")] * 6
    assert published.count([*met, unmeasured], "targets") == "6 targets met, 1 not measured"
    assert published.count([*met, published.Verdict("missed"), unmeasured]) == "6 of 7 met, 1 not measured"
    other = published.Verdict("not compared", "needs a price")
    assert published.count([*met, unmeasured, other]) == "6 met, 2 not compared"
    assert published.count([unmeasured] * 2) == "2 of 2 not compared"


@pytest.mark.parametrize(
    ("value", "ends", "word"),
    [
        (12.9, (10.2, 21.5), "overlaps"),
        (12.9, (12.1, 21.5), "missed"),
        (11.0, (8.0, 14.0), "met"),
        (5.0, (3.0, 6.0), "met"),
        (5.0, (3.0, 5.9), "better"),
        (12.9, None, "missed"),
    ],
)
def test_the_range_of_a_projection_decides(value, ends, word):
    """12.9 hours where 6 to 12 are published, as PPO of the guide's settings is projected for a 4090."""
    assert verdict_of(figure(range=(6, 12), metric="hours", unit="hours"), value, ends).word == word


# -- records ---------------------------------------------------------------------------------------------------------


def summaries_of(name: str, measured: dict[tuple[str, str | None], float], hours: float = 1.0, peak: float = 20.0):
    """Summaries of SFT, reward model and PPO of a recipe, as far as tables read them."""
    figures = recipe.load(ROOT / "recipes" / name / "v1").figures
    all_stages = [f.model_dump(mode="json", exclude_defaults=True) for f in figures if f.stage == "all"]
    return {
        stage: summary_of(
            stage=stage,
            wall_seconds=3600 * hours,
            peak_vram_bytes=peak * 1e9,
            targets=[records.compared(f, measured.get((stage, f.metric))) for f in figures if f.stage == stage],
            all_stages=all_stages,
        )
        for stage in totals.CHAIN
    }


def test_a_record_gives_its_figure_back():
    for name in FIGURES:
        for row in recipe.load(ROOT / "recipes" / name / "v1").figures:
            assert records.figure_of_record(records.compared(row, 1.0)) == row
    before = {"name": "f", "metric": "hours", "published": [61, 61], "published_mean": None, "unit": "h", "measured": 1}
    assert Comparison.model_validate(before | {"within": True}).outcome.word == "met"


def test_reproduce_compares_each_seed_their_mean_and_all_stages_together():
    seeds = {}
    for seed, (perplexity, accuracy, peak) in enumerate([(3.31, 0.74, 19.0), (3.4, 0.73, 21.0)]):
        measured: dict[tuple[str, str | None], float] = {
            ("sft", "perplexity"): perplexity,
            ("rm", "accuracy"): accuracy,
        }
        measured["sft", "peak_vram_gb"] = peak
        seeds[str(seed)] = summaries_of("4090-llama2-7b", measured, hours=6.0, peak=peak)
    rows = {(row[0], row[1]): row[2:] for row in reproduce.rows(seeds)}
    assert rows["stage", "metric"][0] == "published"
    after = rows["sft", "perplexity after (Training Metrics Timeline)"]
    assert after[-1] == "1 of 2 met, mean missed (+1.7 %)"
    assert rows["sft", "held-out perplexity (Step 1, SFT Training)"][-1] == "2 of 2 met, mean met"
    assert rows["rm", "held-out accuracy (Step 2, Reward Model)"][0] == "≥ 0.7"
    assert rows["sft", "peak memory (Step 1, SFT Training)"][-1] == "1 of 2 met, mean met"
    assert rows["ppo", "first KL (Training Metrics Timeline)"][-1].startswith("not compared: 0 by construction")
    assert rows["all", "peak memory (Memory Usage Breakdown)"][-1] == "2 of 2 met, mean met"
    on_timeline = rows["all", "time on the timeline (Training Metrics Timeline)"]
    assert on_timeline[:3] == ("22 hours", "18", "18") and on_timeline[-1] == "2 of 2 better, mean better (-18.2 %)"


def test_reproduce_adds_up_the_cost_where_a_price_is_given():
    seeds = {"0": summaries_of("h100-mistral-7b", {}, hours=8.0)}
    name = "all", "cost of a run (Overview)"
    priced = {row[:2]: row for row in reproduce.rows(seeds, price=1.99)}
    assert priced[name][2:4] == ("47.76 USD", "47.76") and "met (+0.0 %)" in priced[name][-1]
    assert {row[:2]: row for row in reproduce.rows(seeds)}[name][-1].startswith("not compared: needs the price")
