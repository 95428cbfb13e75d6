"""`python -m bench.gpu.workload cuda`: allocations like those of training and rollouts of many lengths."""

import json
import random
import sys

import torch

from bench.gpu.measured import AllocatorPeaks


def workload(kind: str) -> AllocatorPeaks:
    """Return peak bytes after training steps of random lengths, between rollouts.

    A step keeps the activations of 32 layers and frees them in reverse order. Sizes are those of a 7B model on a GPU,
    and a thousandth of them on a CPU.
    """
    random.seed(0)
    width, steps = (4096, 60) if kind == "cuda" else (4, 6)
    base = [torch.empty(1024, width, device=kind) for _ in range(8)]
    for step in range(steps):
        tokens = 8 * random.randint(64, 512)
        activations = []
        for _ in range(32):
            activations += [
                torch.empty(tokens, width * factor, dtype=torch.bfloat16, device=kind) for factor in (1, 1, 3)
            ]
        while activations:
            activations.pop()
        if step % 4 == 3:
            cache = [torch.empty(16, 8 * random.randint(128, 512), width // 4, device=kind) for _ in range(32)]
            del cache
    del base
    if kind != "cuda":
        return {"allocated": None, "reserved": None}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


if __name__ == "__main__":
    print(json.dumps(workload(sys.argv[1])))
