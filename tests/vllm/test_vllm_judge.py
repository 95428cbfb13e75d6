"""The reward `judge` with a real vLLM server's chat endpoint, whose model is SmolLM2."""

from pathlib import Path

import pytest

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.models import gguf
from rlhf.stages.online.judge_reward import JudgeReward
from tests.helpers import RECIPE, free_port
from tests.lines import read_intact_lines
from tests.vllm.server import serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_marks_of_a_served_model_are_asked_for_once_and_counted(tmp_path):
    try:
        base = gguf.fetched(recipe.load(RECIPE.parents[1] / "cpu-smollm2-sums/v1").recipe.model)
    except UserError as error:
        pytest.skip(str(error))
    port = free_port()
    place = f"--host 127.0.0.1 --port {port} --served-model-name smol"
    limits = "--dtype float32 --max-model-len 1024 --gpu-memory-utilization 0.1"
    questions = ["What is 2 + 2?"] * 4, ["4", "I like bananas.", "4", " "]
    with serving(f"VLLM_CPU_KVCACHE_SPACE=1 vllm serve {base} {place} {limits}", port, tmp_path / "log"):
        first = judge(port, tmp_path)
        marks = first(*questions)
    assert marks[0] == marks[2] and marks[3] == 0 and all(0 <= mark <= 1 for mark in marks if mark is not None)
    lines = read_intact_lines(tmp_path / "judged.jsonl")
    assert len(lines) == 2, "equal answers are one question, and an empty one is none"
    assert all(line["tokens_in"] > 80 and line["tokens_out"] > 0 for line in lines)
    again = judge(port, tmp_path)
    assert again(*questions) == marks, "without a server: nothing is asked again"


def judge(port: int, folder: Path) -> JudgeReward:
    """A judge at that port, which keeps its marks in a folder."""
    made = JudgeReward(rubric="Right answers are good.", url=f"http://127.0.0.1:{port}/v1", model="smol")
    made.begin(folder, "cpu")
    return made
