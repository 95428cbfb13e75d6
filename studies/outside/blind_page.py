"""The part of the page about blind predictions: which sets, and what is assumed for each."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.reading import read
from studies.paths import OUTSIDE


class Blind(NamedTuple):
    """A set whose figures nobody here had seen when its predictions were committed."""

    what: str  # card and programs
    figures: str
    assumed: str = ""


SETS = {
    "t4": Blind("T4, fitcheck-llm's loop", "allocated, reserved, process"),
    "rtx4080": Blind("RTX 4080, can-i-finetune-this", "allocated, reserved"),
    "granite": Blind("A100, IBM's PowerLM-3b with fms-acceleration", "allocated"),
    "peft-imagegen-l40s": Blind(
        "L40S, PEFT's comparison of adapters on FLUX.2-klein 4B",
        "reserved at most, allocated after a step",
        "Released versions of diffusers and peft stand for the runs' development versions; each adapter has the run's "
        "number of trainable parameters, or is not predicted.",
    ),
    "litgpt-resource-a100": Blind(
        "A100 40 GB, lit-gpt of 2023: LoRA, adapters",
        "allocated",
        "The longest row comes first and once more after the first update; training validates short rows first.",
    ),
    "litgpt-confighub-a10g": Blind(
        "A10G, litgpt 0.4: LoRA, QLoRA, full",
        "allocated",
        "Every batch has full rows of 512 tokens, those of validation too.",
    ),
    "rasbt-vit-memory": Blind(
        "torchvision's ViT-L/16",
        "reserved",
        "The source names no card; an A100 is assumed. Mixed precision in float16 is predicted as bfloat16, and what "
        "cuDNN's one convolution works in is left out.",
    ),
    "torchao-optim-4070tis": Blind(
        "RTX 4070 Ti SUPER, timm's ViT-g and ViT-H with torchao's optimizers",
        "allocated",
        "Images have 224 pixels, as the script's first version crops them. Gradients that are offloaded leave the card "
        "at once, which is the least that such a run can take.",
    ),
    "xmem-3060-4060-a100": Blind(
        "RTX 3060, RTX 4060, A100: xMem's loop",
        "process",
        "CUDA's context is assumed: 230 MiB on the RTX 3060, 200 MiB on the RTX 4060, 430 MiB on the A100. "
        "What cuDNN's convolutions work in is not known, so that convolutional models are predicted without it.",
    ),
}
SECTION = """
## Blind predictions

Each file holds predictions for runs whose measured figures nobody here had seen when it was committed, and names its
date and the commit of the code. A correction is a second file. The last six sets have not been compared yet. Their
programs run at full depth, with the authors' models and libraries; the loops are our own code of theirs
(`python -m studies.outside.others SET`).

| set | runs | predicted | figures | date and commit | file |
| --- | ---: | ---: | --- | --- | --- |
{rows}

Runs without a prediction, and why:

{refused}

What is assumed:

- On an NF4 base the 4080's runs compute in float32, because peft casts what is not packed and bitsandbytes computes in
  the type of its input. So attention is neither flash attention nor the memory-efficient kernel, but plain steps.
- Checkpointing of the 4080's NF4 runs was reentrant; it is predicted as if it were not.
- The loops ran with later versions of the libraries than these runs, whose sources were read where memory is concerned.
- Seconds of a step are intervals, from counted work and nominal rates. The T4's are calibrated by hand on open runs of
  Qwen2.5-1.5B and TinyLlama.
{assumed}
"""


def section() -> str:
    """Return the part of the page."""
    files = {name: read(OUTSIDE / f"blind-{name}.json", dict[str, Any]) for name in SETS}
    return SECTION.format(
        rows="\n".join(_row(name, content) for name, content in files.items()),
        refused="\n".join(line for name, content in files.items() for line in _refused(name, content)),
        assumed="\n".join(f"- {name}: {one.assumed}" for name, one in SETS.items() if one.assumed),
    )


def _row(name: str, content: dict[str, Any]) -> str:
    predicted = sum("refused" not in run for run in content["runs"])
    when = f"{content['predicted'][:10]}, {content['code']['commit'][:8]}"
    cells = [SETS[name].what, str(len(content["runs"])), str(predicted), SETS[name].figures, when]
    return f"| {' | '.join(cells)} | [blind-{name}.json](blind-{name}.json) |"


def _refused(name: str, content: dict[str, Any]) -> Iterator[str]:
    reasons = Counter(run["refused"] for run in content["runs"] if "refused" in run)
    for reason, runs in reasons.items():
        yield f"- {name}, {runs} run{'s' if runs > 1 else ''}: {reason}"
