"""Every type of model that is tested, through every stage, as a checkpoint in a folder with a chat template."""

import math
from pathlib import Path

import pytest
import torch

from rlhf.data.rows import Message
from rlhf.models.adapters import attach_adapter
from rlhf.models.loading import load_base, load_merged
from rlhf.rollout.speaker import Speaker
from rlhf.run.directory import StageRun
from tests import models
from tests.helpers import GROUP, TWO_STEPS, content_of, run_stages, toy_pairs
from tests.lines import read_intact_lines

STAGES = ("sft", "rm", "ppo", "grpo", "dpo", "evaluate", "merge")
# What every type costs, twelve times over: two steps of training, and few held-out rows of few tokens.
FEW_STEPS = TWO_STEPS | {"ppo__steps": 2, "ppo__save_steps": 2, "ppo__norm_responses": 8}
FEW_ROWS = {f"{stage}__max_eval_samples": 4 for stage in ("sft", "rm", "ppo", "dpo")}
FEW_ROWS |= {"evaluate__max_samples": 4, "evaluate__response_length": 8}
FEW_GROUPS = GROUP | {"steps": 2, "save_steps": 2, "max_eval_samples": 4}
QUESTION = [Message("user", "Which word is the opposite of full?")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*models.KINDS, *models.OTHER_KINDS, *models.MULTIMODAL])
def test_every_stage_runs(trained, tmp_path, kind):
    checkpoint = models.checkpoint(tmp_path / "model", kind)
    pairs = toy_pairs(trained).read_text().splitlines(keepends=True)
    (tmp_path / "pairs.jsonl").write_text("".join(pairs[:80]))  # each stage reads and checks all of them
    own = {"data__files": [str(tmp_path / "pairs.jsonl")], "merge__stage": "ppo"}
    loaded = models.recipe_for(checkpoint, trained, grpo=FEW_GROUPS, **own, **FEW_STEPS, **FEW_ROWS)
    out = tmp_path / "runs"
    run_stages(loaded, out, *STAGES)
    folder = out / "cpu-tiny/v1"
    for stage in ("sft", "rm", "ppo", "grpo", "dpo"):
        rows = read_intact_lines(folder / stage / "metrics.jsonl")
        assert all(math.isfinite(value) for row in rows for value in row.values()), stage
    for row in read_intact_lines(folder / "ppo" / "metrics.jsonl"):
        # steps and passes of recurrent layers round apart, in these models of large random weights most of all
        assert row["rollout/logprob_diff_max"] < 3e-3, "it is trained on what it sampled"
    first = read_intact_lines(folder / "dpo" / "metrics.jsonl")[0]["loss"]  # policy and reference begin equal
    assert abs(first - math.log(2)) < 0.01
    evaluated = {key.split("/")[0] for key in content_of(folder / "evaluate" / "summary.json")["metrics"]}
    assert {"base", "sft", "ppo", "grpo", "dpo"} <= evaluated
    merged_answers_as_the_adapter(StageRun(out, loaded, "evaluate"), folder)
    run = StageRun(out, loaded, "evaluate")
    from_adapter, merged = (Speaker(run, stage) for stage in ("ppo", "merge"))
    assert from_adapter.answer(QUESTION, 0.0, 8, print) == merged.answer(QUESTION, 0.0, 8, print)


def merged_answers_as_the_adapter(run: StageRun, folder: Path) -> None:
    device = torch.device("cpu")
    ids = torch.arange(5, 25)[None]
    adapted = attach_adapter(load_base(run.base, device), folder / "ppo/adapter").eval()
    merged = load_merged(folder / "merge" / "model", device).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-4, rtol=1e-4)
