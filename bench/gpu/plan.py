"""The items of the GPU benchmark in the order in which they run: most value per minute first."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import click

from bench.targets import DECODING_MBU, HOURS, MFU, PEAK
from rlhf.terminal.wording import GB

NEAR = 0.05  # share of a phase's measured peak by which its prediction may miss it
SWITCH_MS = 5.0  # milliseconds that a switch between roles may take
H100, H100_LEAN, RTX4090 = "h100-mistral-7b/v2", "h100-mistral-7b/v4", "4090-llama2-7b/v2"
GUIDE_H100, GUIDE_4090 = "h100-mistral-7b/v1", "4090-llama2-7b/v1"  # the guides' own settings
SMALL_CARD = {"RLHF_VRAM_CAP": "24GB"}  # a larger card is held to the memory of an RTX 4090


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


class GpuItem(NamedTuple):
    """One item: a separate process that runs for at most `minutes` and writes one record."""

    name: str
    minutes: float
    claim: str  # what its record decides
    function: str  # module and function below bench.gpu; called with a Context and the options
    recipe: str | None = None  # folder below recipes/ whose shapes it uses; None: it is about the card alone
    options: Mapping[str, object] = {}  # keyword arguments of the function
    modules: tuple[str, ...] = ()  # packages that not every machine has
    environment: Mapping[str, str] = {}


ITEMS = (
    GpuItem(
        "device",
        1,
        "The card, its driver and the packages are those that the recipes are written for.",
        "machine:device",
    ),
    GpuItem(
        "chain-lean",
        2,
        "SFT, reward model, PPO, GRPO and DPO run on the lean trunk in bfloat16, and DPO starts at its reference.",
        "suites:measure",
        options={"tests": ["tests/gpu"], "choose": "chain and lean"},
        modules=("pytest",),
    ),
    GpuItem(
        "hours-v4",
        4,
        "By their mean step on rows as long as HH-RLHF's, SFT, reward model and PPO of the lean trunk take at most "
        f"{HOURS:g} hours together.",
        "speed:measure",
        H100_LEAN,
        {"shape": "hh", "stages": ["sft", "rm", "ppo"]},
    ),
    GpuItem(
        "published-h100",
        4,
        f"With the H100 guide's own settings the peak of every phase is within {_percent(NEAR)} of what predicted.json "
        "has.",
        "memory:measure",
        GUIDE_H100,
    ),
    GpuItem(
        "published-4090",
        4,
        f"With the 4090 guide's own settings the peak of every phase is within {_percent(NEAR)} of what predicted.json "
        "has, and every stage fits 24 GB.",
        "memory:measure",
        GUIDE_4090,
        modules=("bitsandbytes",),
        environment=SMALL_CARD,
    ),
    GpuItem(
        "training",
        4,
        f"A micro-batch is bound by the GPU and not by its host, and switching roles takes at most {SWITCH_MS:g} ms.",
        "training:measure",
        H100,
    ),
    GpuItem(
        "decoding",
        5,
        f"A decoding step of 16 rows reads at {_percent(DECODING_MBU)} of the bandwidth of a large copy.",
        "decoding:measure",
        H100_LEAN,
        {"rows": [16, 64]},
    ),
    GpuItem(
        "memory-h100",
        4,
        f"The peak of every phase is within {_percent(NEAR)} of what predicted.json has.",
        "memory:measure",
        H100,
    ),
    GpuItem(
        "memory-4090",
        4,
        f"The peak of every phase is within {_percent(NEAR)} of what predicted.json has, every stage fits 24 GB, and "
        f"none allocates more than {PEAK / GB:g} GB.",
        "memory:measure",
        RTX4090,
        modules=("bitsandbytes",),
        environment=SMALL_CARD,
    ),
    GpuItem(
        "speed-h100",
        6,
        f"SFT and DPO reach {_percent(MFU)} of the rate of a large product; PPO decodes at {_percent(DECODING_MBU)} of "
        "the bandwidth of a large copy.",
        "speed:measure",
        H100,
        {"shape": "longest", "stages": ["sft", "rm", "ppo", "dpo"]},
    ),
    GpuItem(
        "ppo-4090",
        5,
        "PPO of the 24 GB recipe runs as `rlhf run` within 24 GB.",
        "speed:measure",
        RTX4090,
        {"shape": "hh", "stages": ["ppo"]},
        modules=("bitsandbytes",),
        environment=SMALL_CARD,
    ),
    GpuItem(
        "decoding-nf4",
        3,
        f"A decoding step on a 4-bit base reads its packed weights at {_percent(DECODING_MBU)} of the bandwidth of a "
        "large copy.",
        "decoding:measure",
        RTX4090,
        {"rows": [20, 8]},
        modules=("bitsandbytes",),
    ),
    GpuItem(
        "tests",
        11,
        "Every test of tests/gpu passes: chains in 16 and 4 bits, twice with the same bits, with the memory that is "
        "predicted, and micro-batches whose gradients differ by rounding only.",
        "suites:measure",
        options={"tests": ["tests/gpu"], "choose": "not (chain and lean)"},
        modules=("pytest", "bitsandbytes"),
    ),
)
# What an H200 has decided (docs/internals.md). Its records stay; such an item is not run again.
DECIDED = (*("graphs", "chain-bf16", "chain-nf4", "repeat", "hours-h100", "small-memory", "paged"),)


def choose(only: tuple[str, ...]) -> list[GpuItem]:
    """Return the items with these names, in the order of the plan; all without names."""
    names = [item.name for item in ITEMS]
    for name in only:
        if name not in names:
            raise click.BadParameter(f"{name!r} is not an item; there are {', '.join(names)}", param_hint="--only")
    return [item for item in ITEMS if not only or item.name in only]


def seconds(box: str) -> float:
    """Return the seconds of `90s`, `9m` or `1h`. Raises a usage error for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", box)
    if not match:
        raise click.BadParameter(f"{box!r}: write 90s, 9m or 1h", param_hint="--box")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
