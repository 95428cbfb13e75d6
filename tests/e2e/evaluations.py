"""Evaluations as the stage leaves them, made of given answers."""

import json
from pathlib import Path
from typing import Any

from tests.records import write_records


def evaluation(out: Path, rows: list[dict[str, Any]]) -> Path:
    """A finished evaluation as the stage leaves it; returns `<out>/<recipe>/<version>`."""
    root = out / "cpu-tiny" / "v1"
    (root / "evaluate").mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"step": 0, **row}, ensure_ascii=False) + "\n" for row in rows)
    (root / "evaluate" / "samples.jsonl").write_text("".join(lines), encoding="utf-8")
    write_records(root / "evaluate")
    return root


def row(
    i: int, sft: str = "a poor answer", ppo: str = "a good answer", scores: tuple[float, float] = (0.0, 1.0)
) -> dict[str, Any]:
    answers = {"sft": {"response": sft, "score": scores[0]}, "ppo": {"response": ppo, "score": scores[1]}}
    return {"prompt": f"\n\nHuman: question {i}\n\nAssistant:", **answers}
