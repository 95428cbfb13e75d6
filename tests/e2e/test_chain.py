"""The whole chain at test size: the same stages, files and trainers as every recipe."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.errors import UserError
from rlhf.evaluation import compare
from rlhf.files import sha256
from rlhf.rating.pairs import pair_answers
from rlhf.run.logs import Logs
from tests.helpers import Crash, beside, content_of, crash, run_stages, small, undefined_metrics
from tests.lines import read_intact_lines

ROOT = Path("cpu-tiny/v1")
ADAPTERS = ("sft", "rm", "ppo", "dpo")
CHAIN = ("pretrain", *ADAPTERS, "evaluate", "merge")
WEIGHTS = "adapter/adapter_model.safetensors"


def digests(root: Path) -> dict[str, str]:
    files = [ROOT / stage / WEIGHTS for stage in ADAPTERS]
    files += [ROOT / stage / "metrics.jsonl" for stage in ("pretrain", *ADAPTERS)]
    return {str(file): hashlib.sha256((root / file).read_bytes()).hexdigest() for file in files}


def test_every_stage_leaves_what_the_next_reads(chain):
    root = chain / ROOT
    for stage in CHAIN:
        summary = content_of(root / stage / "summary.json")
        assert (summary["status"], summary["stage"], summary["modified"]) == ("done", stage, True)
        assert summary["metrics"] and undefined_metrics(summary) == set(), stage
        if stage not in ("evaluate", "merge"):
            assert read_intact_lines(root / stage / "metrics.jsonl")
            assert list((root / stage / "checkpoints").glob("step-*/checkpoint.json"))
    for stage in ADAPTERS:
        config = content_of(root / stage / "adapter/adapter_config.json")
        assert config["base_model_name_or_path"] == str((root / "pretrain/model").resolve())
    metrics = content_of(root / "evaluate/summary.json")["metrics"]
    assert {"base/true_reward", "sft/score", "ppo/kl_per_token", "dpo/win_rate_vs_sft"} <= metrics.keys()


def test_a_stage_that_is_done_is_not_run_again(chain):
    file = chain / ROOT / "sft/summary.json"
    before = file.read_bytes(), file.stat().st_mtime_ns
    run_stages(small(), chain, "sft")
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before


def test_the_merged_model_is_base_plus_adapter(chain):
    root = chain / ROOT
    base = AutoModelForCausalLM.from_pretrained(root / "pretrain/model")
    both = PeftModel.from_pretrained(base, root / "ppo/adapter").eval()
    ids = AutoTokenizer.from_pretrained(root / "merge/model")("\n\nHuman: Hello\n\nAssistant:", return_tensors="pt")
    with torch.no_grad():
        expected = both(input_ids=ids["input_ids"]).logits
        merged = AutoModelForCausalLM.from_pretrained(root / "merge/model")(input_ids=ids["input_ids"]).logits
        bare = both.unload()(input_ids=ids["input_ids"]).logits
    assert (merged - expected).abs().max() < 1e-4 and (bare - expected).abs().max() > 1e-3


def test_same_seed_same_bytes_in_another_process_and_another_seed_others(chain, tmp_path):
    code = "from pathlib import Path; from tests.helpers import run_stages, small; "
    code += f"run_stages(small(), Path({str(tmp_path / 'same')!r}), 'pretrain', 'sft', 'rm', 'ppo', 'dpo')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert digests(tmp_path / "same") == digests(chain)
    run_stages(small(seed=1), tmp_path / "other", "pretrain", "sft")
    assert (tmp_path / "other" / ROOT / "sft" / WEIGHTS).read_bytes() != (chain / ROOT / "sft" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("stage", ["pretrain", "sft", "rm", "dpo", "ppo"])
def test_resuming_after_a_crash_gives_the_same_bytes(chain, tmp_path, monkeypatch, stage):
    """Stopped between two checkpoints, continued: the same adapter and the same metrics as without the crash."""
    parents = {"pretrain": (), "sft": ("pretrain",), "rm": ("pretrain", "sft"), "dpo": ("pretrain", "sft")}
    target = beside(chain, tmp_path, *parents.get(stage, ("pretrain", "sft", "rm"))) / ROOT / stage
    stop_after = {"pretrain": 6, "ppo": 2}.get(stage, 4)
    crash(monkeypatch, stop_after)
    with pytest.raises(Crash):
        run_stages(small(), tmp_path, stage)
    assert not (target / "summary.json").exists()
    record = next((target / "checkpoints").glob(f"step-{stop_after:06d}")) / "checkpoint.json"
    record.write_text(json.dumps(content_of(record) | {"wall_seconds": 1000.0}))
    monkeypatch.undo()
    summary = run_stages(small(), tmp_path, stage, resume=True)
    assert summary["wall_seconds"] > 1000, "what went before counts"
    for name in ("model/model.safetensors" if stage == "pretrain" else WEIGHTS, "metrics.jsonl"):
        assert (target / name).read_bytes() == (chain / ROOT / stage / name).read_bytes(), name
    assert content_of(target / "manifest.json")["resumed_from"] == f"step-{stop_after:06d}"


def test_resuming_after_the_last_step_takes_no_other_one(chain, tmp_path, monkeypatch):
    """Stopped between the last checkpoint, in the middle of an epoch, and the result: no step is left to take."""
    whole, stopped = (beside(chain, tmp_path / name, "pretrain") for name in ("whole", "stopped"))
    loaded = small(sft__max_steps=6, sft__lr_scheduler_type="constant")
    run_stages(loaded, whole, "sft")
    crash(monkeypatch, 6)
    with pytest.raises(Crash):
        run_stages(loaded, stopped, "sft")
    monkeypatch.undo()
    run_stages(loaded, stopped, "sft", resume=True)
    for name in (WEIGHTS, "metrics.jsonl"):
        assert (stopped / ROOT / "sft" / name).read_bytes() == (whole / ROOT / "sft" / name).read_bytes(), name


def test_changed_data_is_noticed(chain, tmp_path):
    target = beside(chain, tmp_path, "pretrain", "sft") / ROOT
    (target / "data").unlink()
    shutil.copytree(chain / ROOT / "data", target / "data")
    for file in (target / "data").rglob("*.jsonl"):
        file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(UserError, match=r"jsonl"):
        run_stages(small(), tmp_path, "rm")
    for file in (target / "data").rglob("*.jsonl"):  # as if it had been made so
        hashes = {name: sha256(file.parent / name) for name in ("corpus.jsonl", "pairs.jsonl")}
        (file.parent / "made.json").write_text(json.dumps({"sha256": hashes}))
    with pytest.raises(UserError, match="data has changed"):
        run_stages(small(), tmp_path, "rm")


def test_a_new_policy_is_evaluated_and_what_was_made_from_another_is_made_again(chain, tmp_path):
    target = beside(chain, tmp_path, "pretrain", "sft", "rm", "merge") / ROOT
    first = run_stages(small(), tmp_path, "evaluate")
    assert not any(key.startswith(("dpo/", "ppo/")) for key in first["metrics"])
    changed = small(ppo__kl_coef=0.5, ppo__steps=1, ppo__eval_steps=1, ppo__warmup_steps=0)
    second = run_stages(changed, tmp_path, "ppo", "evaluate")
    assert "ppo/true_reward" in second["metrics"]
    assert content_of(target / "evaluate.before-1/summary.json") == first
    with pytest.raises(UserError, match=r"merge.*ppo\."):  # made of other settings: never overwritten
        run_stages(changed, tmp_path, "merge")


def test_several_answers_to_each_prompt(chain, tmp_path):
    target = beside(chain, tmp_path, "pretrain", "sft", "rm", "dpo") / ROOT
    summary = run_stages(small(evaluate__num_samples=2), tmp_path, "evaluate")  # and DPO is taken as it is
    rows = read_intact_lines(target / "evaluate/samples.jsonl")
    assert [row["sample"] for row in rows] == [0, 1] * 8
    assert all(a["prompt"] == b["prompt"] for a, b in zip(rows[::2], rows[1::2], strict=True))
    assert sum(a["sft"] != b["sft"] for a, b in zip(rows[::2], rows[1::2], strict=True)) > 4
    scores = [row["dpo"]["score"] for row in rows]
    assert summary["metrics"]["dpo/score"] == pytest.approx(sum(scores) / len(scores), abs=1e-6)
    pairs = pair_answers(target, "sft", "dpo").pairs
    assert {rows[pair.item]["sample"] for pair in pairs} == {0} and len(pairs) > 4


def test_two_policies_compared_say_what_the_evaluation_says(chain):
    """PPO and DPO of one run: the differences of means are those of its metrics, and the reward model is the same."""
    root = chain / ROOT
    compared = compare.compare_runs(*(compare.Side(compare.load(root, name)) for name in ("dpo", "ppo")))
    metrics = content_of(root / "evaluate/summary.json")["metrics"]
    rows = {row.name: row._asdict() for row in compared.rows}
    for key in ("score", "true_reward", "perplexity", "kl_per_token"):
        assert rows[key]["a"] == pytest.approx(metrics[f"dpo/{key}"], abs=1e-6)
        assert rows[key]["b"] == pytest.approx(metrics[f"ppo/{key}"], abs=1e-6)
    for key in ("score", "true_reward"):
        assert rows[key]["difference"] == pytest.approx(metrics[f"ppo/{key}"] - metrics[f"dpo/{key}"], abs=1e-6)
    assert compared.settings == {} and compared.prompts == 8


def test_resume_refuses_data_that_changed_meanwhile(tmp_path, monkeypatch):
    lines = [json.dumps({"text": f"Number {n} is followed by {n + 1}."}) + "\n" for n in range(60)]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(lines))
    loaded = small(data__source="files", data__files=[str(file)])
    crash(monkeypatch, after=6)
    with pytest.raises(Crash):
        run_stages(loaded, tmp_path, "pretrain")
    monkeypatch.undo()
    file.write_text("".join(lines[:50]))
    with pytest.raises(UserError, match="data has changed"):
        run_stages(loaded, tmp_path, "pretrain", resume=True)
    file.write_text("".join(lines))
    run_stages(loaded, tmp_path, "pretrain", resume=True)
    file.write_text("".join(lines[:50]))
    with pytest.raises(UserError, match=r"texts\.jsonl"):
        run_stages(loaded, tmp_path, "pretrain")


def test_a_resumed_run_has_each_step_once_in_tensorboard(chain, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard comes with the tracking extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    target = beside(chain, tmp_path, "pretrain", "sft", "rm") / ROOT / "ppo"
    loaded = small(ppo__save_steps=2, ppo__logging_steps=1)
    write = Logs.metrics

    def until_step_3(self, step, values):
        write(self, step, values)
        if step == 3:
            raise Crash

    monkeypatch.setattr(Logs, "metrics", until_step_3)
    with pytest.raises(Crash):
        run_stages(loaded, tmp_path, "ppo", report_to=["tensorboard"])
    monkeypatch.undo()
    run_stages(loaded, tmp_path, "ppo", resume=True, report_to=["tensorboard"])
    events = EventAccumulator(str(target / "tensorboard"))
    events.Reload()
    found = events.Scalars("objective/scores")
    logged = read_intact_lines(target / "metrics.jsonl")
    assert [event.step for event in found] == [row["step"] for row in logged] == [1, 2, 3, 4]
    assert [event.value for event in found] == pytest.approx([row["objective/scores"] for row in logged], abs=1e-4)
