"""How large a model fits a card: predicted need of each training stage by model size, and the chart of docs/memory.md.

One setting for all sizes, with which one would train: an NF4 base with LoRA adapters of rank 16, a batch of 16 rows of
512 tokens, gradient checkpointing, a paged 8-bit AdamW. PPO has all four roles on the one base. Rows go through the
card 2 at a time, and 8 prompts are decoded together; neither changes the result.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from typing_extensions import TypedDict

from bench.reading import read
from rlhf import recipe as recipes
from rlhf.plan.fit import USABLE
from rlhf.plan.predict import Predictor, card_needed_bytes
from rlhf.recipe import Changes, StageName
from rlhf.terminal.wording import GB

SIZES_FILE = Path(__file__).with_suffix(".json")
BASED_ON = "4090-llama2-7b/v2"
CHARTED: tuple[StageName, ...] = ("sft", "rm", "ppo", "dpo")
ROWS, AT_ONCE, DECODED = 16, 2, 8  # rows of an optimizer step, in a micro-batch, decoded together


class Size(NamedTuple):
    """The shape of a published model."""

    name: str
    billions: float  # of parameters
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False


MODEL_SIZES = (
    Size("Llama-3.2-1B", 1.24, 2048, 8192, 16, 32, 8, 128256, tied=True),
    Size("Llama-3.2-3B", 3.21, 3072, 8192, 28, 24, 8, 128256, tied=True),
    Size("Llama-2-7B", 6.74, 4096, 11008, 32, 32, 32, 32000),
    Size("Llama-3.1-8B", 8.03, 4096, 14336, 32, 32, 8, 128256),
    Size("Llama-2-13B", 13.02, 5120, 13824, 40, 40, 40, 32000),
    Size("CodeLlama-34B", 33.74, 8192, 22016, 48, 64, 8, 32000),
    Size("Llama-2-70B", 68.98, 8192, 28672, 80, 64, 8, 32000),
)
# MiB: of the two larger cards as nvidia-smi shows them, of the others the nominal GiB.
CARD_MEMORY = {"8 GB": 8192, "12 GB": 12288, "24 GB": 24564, "80 GB": 81559}
LARGE = 20.0  # billions of parameters from which the card is an H100 and not a 4090


class Sizes(TypedDict):
    """The content of sizes.json."""

    unit: str
    based_on: str  # recipe and version
    needed: dict[str, dict[StageName, int]]  # model -> stage -> bytes of the card, predicted


def content() -> Sizes:
    """Return what was predicted last, as sizes.json has it."""
    return read(SIZES_FILE, Sizes)


def changes(size: Size) -> Changes:
    """Return the keys that make the recipe one for this model."""
    overrides: Changes = {
        f"model.architecture.{key}": value
        for key, value in {
            "vocab_size": size.vocabulary,
            "hidden_size": size.hidden,
            "intermediate_size": size.inner,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "tie_word_embeddings": size.tied,
        }.items()
    }
    for stage in ("sft", "rm", "dpo"):
        overrides[f"{stage}.per_device_train_batch_size"] = AT_ONCE
        overrides[f"{stage}.gradient_accumulation_steps"] = ROWS // AT_ONCE
    overrides |= {
        "hardware.name": "h100" if size.billions > LARGE else "4090",
        "ppo.batch_size": ROWS,
        "ppo.num_mini_batches": 1,
        "ppo.per_device_train_batch_size": AT_ONCE,
        "ppo.score_batch_size": AT_ONCE,
        "ppo.rollout_batch_size": DECODED,
        "evaluate.batch_size": DECODED,
    }
    return overrides


def predict(root: Path, say: Callable[[str], None]) -> Sizes:
    """Return the bytes of the card that each stage is predicted to need, by model."""
    needs: dict[str, dict[StageName, int]] = {}
    with Predictor() as predictor:
        for size in MODEL_SIZES:
            loaded = recipes.load(root / BASED_ON, changes(size))
            needs[size.name] = {stage: card_needed_bytes(predictor.predict(loaded, stage).whole) for stage in CHARTED}
            say(f"{size.name}: " + ", ".join(f"{stage} {n / GB:.1f}" for stage, n in needs[size.name].items()))
    return {"unit": "bytes of the card, predicted", "based_on": BASED_ON, "needed": needs}


def largest(needs: Mapping[str, Mapping[StageName, int]], stage: StageName, mebibytes: int) -> Size | None:
    """Return the largest model with which a stage needs no more than a card has."""
    return next((s for s in reversed(MODEL_SIZES) if needs[s.name][stage] <= mebibytes * 2**20), None)


def table(predicted: Sizes) -> str:
    """Return the predicted need in GB as Markdown, and the largest model of the list whose PPO fits each card."""
    needs = predicted["needed"]
    lines = [
        "| model | parameters, 10^9 | " + " | ".join(CHARTED) + " |",
        "| --- | ---: |" + " ---: |" * len(CHARTED),
    ]
    for size in MODEL_SIZES:
        cells = " | ".join(f"{needs[size.name][stage] / GB:.1f}" for stage in CHARTED)
        lines.append(f"| {size.name} | {size.billions:.1f} | {cells} |")
    heading = f"largest model whose PPO needs at most {USABLE:.0%} of it".replace("%", " %")
    lines += ["", f"| card | {heading} | needs, GB | card, GB |", "| --- | --- | ---: | ---: |"]
    for card, mebibytes in CARD_MEMORY.items():
        best = largest(needs, "ppo", round(USABLE * mebibytes))
        name, need = (best.name, f"{needs[best.name]['ppo'] / GB:.2f}") if best else ("none of these", "")
        lines.append(f"| {card} | {name} | {need} | {mebibytes * 2**20 / GB:.2f} |")
    return "\n".join(lines)
