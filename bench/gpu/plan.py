"""The items of the GPU benchmark in the order in which they run: most value per minute first."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import click

from bench.targets import DECODING_MBU, HOURS, MFU, PEAK
from rlhf.memory.predict import FRAGMENTATION
from rlhf.terminal.wording import GB

NEAR = 0.05  # share of a phase's measured peak by which its prediction may miss it
SWITCH_MS = 5.0  # milliseconds that a switch between roles may take
H100, RTX4090 = "h100-mistral-7b/v2", "4090-llama2-7b/v2"
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
    runs_on_cpu: bool = True  # whether a dry run can do it on a CPU
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
        "graphs",
        1,
        "Decoding steps can be captured as CUDA graphs again and again, and draw the tokens of plain steps.",
        "machine:graphs",
        runs_on_cpu=False,
    ),
    GpuItem(
        "attention",
        2,
        "Attention takes flash without a mask and the memory-efficient kernel with one, as memory predictions assume, "
        "and no new shape waits for a plan.",
        "attention:measure",
        H100,
    ),
    GpuItem(
        "allocator",
        1,
        f"With expandable segments the allocator reserves at most {_percent(FRAGMENTATION)} more than it allocates.",
        "machine:allocator",
    ),
    GpuItem(
        "chain-bf16",
        3,
        "SFT, reward model, PPO and DPO run in bfloat16, and DPO starts at its reference.",
        "suites:measure",
        options={"tests": ["tests/gpu", "tests/invariants/test_rollout.py"], "choose": "chain and none or captured"},
        modules=("pytest",),
    ),
    GpuItem(
        "chain-nf4",
        3,
        "SFT, reward model, PPO and DPO run on a 4-bit base, with a paged optimizer that pages.",
        "suites:measure",
        options={"tests": ["tests/gpu"], "choose": "chain and nf4"},
        modules=("pytest", "bitsandbytes"),
    ),
    GpuItem(
        "repeat",
        3,
        "Two runs of SFT, reward model, PPO and DPO with one seed have the same bits, in bfloat16 and on a 4-bit base.",
        "suites:measure",
        options={"tests": ["tests/gpu"], "choose": "same_bits"},
        modules=("pytest", "bitsandbytes"),
    ),
    GpuItem(
        "decoding",
        5,
        f"A decoding step of 16 rows reads at {_percent(DECODING_MBU)} of the bandwidth of a large copy.",
        "decoding:measure",
        H100,
        {"rows": [16, 8, 32]},
    ),
    GpuItem(
        "training",
        4,
        f"A micro-batch is bound by the GPU and not by its host, and switching roles takes at most {SWITCH_MS:g} ms.",
        "training:measure",
        H100,
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
        "hours-h100",
        4,
        "By their mean step on rows as long as HH-RLHF's, SFT, reward model and PPO take at most "
        f"{HOURS:g} hours together.",
        "speed:measure",
        H100,
        {"shape": "hh", "stages": ["sft", "rm", "ppo"]},
    ),
    GpuItem(
        "nf4",
        2,
        "What bitsandbytes chooses for the rows of a decoding step is the fastest choice when weights are cold.",
        "nf4:products",
        RTX4090,
        modules=("bitsandbytes",),
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
        "compiled",
        3,
        "Layers through torch.compile make a micro-batch faster than the lean trunk does.",
        "training:compiled",
        H100,
    ),
    GpuItem(
        "small-memory",
        4,
        "Memory of a small model is as predicted in every phase, and a micro-batch changes gradients by rounding only.",
        "suites:measure",
        options={"tests": ["tests/gpu"], "choose": "not chain and not same_bits"},
        modules=("pytest", "bitsandbytes"),
    ),
    GpuItem(
        "paged",
        2,
        "Paged 8-bit AdamW makes the updates of the unpaged one, with its states outside of the allocator.",
        "nf4:paged",
        RTX4090,
        runs_on_cpu=False,
        modules=("bitsandbytes",),
    ),
)


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
