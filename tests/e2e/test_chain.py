"""The whole chain at test size: the same stages, files and trainers as every recipe."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.run import RunError, read_json, read_lines
from tests.conftest import run_stages, small

ADAPTERS = ("sft", "rm", "ppo", "dpo")
CHAIN = ("pretrain", "sft", "rm", "ppo", "dpo", "evaluate", "merge")


def digests(root: Path) -> dict[str, str]:
    files = [root / "cpu-tiny/v1" / stage / "adapter/adapter_model.safetensors" for stage in ADAPTERS]
    files += [root / "cpu-tiny/v1" / stage / "metrics.jsonl" for stage in ("pretrain", *ADAPTERS)]
    return {str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("chain")
    run_stages(small(), out, *CHAIN)
    return out


def test_every_stage_leaves_what_the_next_reads(chain):
    root = chain / "cpu-tiny/v1"
    for stage in CHAIN:
        summary = read_json(root / stage / "summary.json")
        assert summary is not None, stage
        assert (summary["status"], summary["stage"], summary["modified"]) == ("done", stage, True)
        assert all(value == value for value in summary["metrics"].values()), stage  # no NaN
        manifest = read_json(root / stage / "manifest.json")
        assert manifest is not None
        assert manifest["packages"]["trl"]
        if stage not in ("evaluate", "merge"):
            assert read_lines(root / stage / "metrics.jsonl")
            assert list((root / stage / "checkpoints").glob("step-*/checkpoint.json"))
    for stage in ADAPTERS:
        config = json.loads((root / stage / "adapter/adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str((root / "pretrain/model").resolve())
    assert [p.name for p in sorted((root / "ppo/checkpoints").glob("step-*"))] == [
        f"step-{n:06d}" for n in (1, 2, 3, 4)
    ]
    assert {"base/true_reward", "sft/score", "ppo/kl_per_token", "dpo/win_rate_vs_sft"} <= set(
        read_json(root / "evaluate/summary.json")["metrics"]
    )


def test_a_stage_that_is_done_is_not_run_again(chain):
    file = chain / "cpu-tiny/v1/sft/summary.json"
    before = file.read_bytes(), file.stat().st_mtime_ns
    run_stages(small(), chain, "sft")
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before


def test_the_merged_model_is_base_plus_adapter(chain):
    root = chain / "cpu-tiny/v1"
    base = AutoModelForCausalLM.from_pretrained(root / "pretrain/model")
    both = PeftModel.from_pretrained(base, root / "ppo/adapter").eval()
    ids = AutoTokenizer.from_pretrained(root / "merge/model")("\n\nHuman: Hello\n\nAssistant:", return_tensors="pt")
    with torch.no_grad():
        expected = both(input_ids=ids["input_ids"]).logits
        merged = AutoModelForCausalLM.from_pretrained(root / "merge/model")(input_ids=ids["input_ids"]).logits
        bare = both.unload()(input_ids=ids["input_ids"]).logits
    assert (merged - expected).abs().max() < 1e-4
    assert (bare - expected).abs().max() > 1e-3


def test_same_seed_same_bytes_in_another_process(chain, tmp_path):
    code = "from pathlib import Path; from tests.conftest import run_stages, small; "
    code += f"run_stages(small(), Path({str(tmp_path)!r}), 'pretrain', 'sft', 'rm', 'ppo', 'dpo')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert digests(tmp_path) == digests(chain)


def test_another_seed_gives_another_result(chain, tmp_path):
    loaded = small(seed=1)
    run_stages(loaded, tmp_path, "pretrain", "sft")
    name = "cpu-tiny/v1/sft/adapter/adapter_model.safetensors"
    assert (tmp_path / name).read_bytes() != (chain / name).read_bytes()


@pytest.mark.parametrize("stage", ["pretrain", "sft", "rm", "dpo", "ppo"])
def test_resuming_after_a_crash_gives_the_same_bytes(chain, tmp_path, monkeypatch, stage):
    """Stopped between two checkpoints, continued: the same adapter and the same metrics as without the crash."""
    source = chain / "cpu-tiny/v1"
    target = tmp_path / "cpu-tiny/v1"
    target.mkdir(parents=True)
    (target / "data").symlink_to(source / "data")
    parents = {"pretrain": (), "sft": ("pretrain",), "rm": ("pretrain", "sft"), "dpo": ("pretrain", "sft")}
    for parent in parents.get(stage, ("pretrain", "sft", "rm")):
        (target / parent).symlink_to(source / parent)

    class Crash(Exception):
        pass

    from rlhf.run import Run

    seal, stop_after = Run.seal_checkpoint, {"pretrain": 6, "ppo": 2}.get(stage, 4)

    def crash_after(self, step, folder):
        sealed = seal(self, step, folder)
        if step == stop_after:
            raise Crash
        return sealed

    monkeypatch.setattr(Run, "seal_checkpoint", crash_after)
    with pytest.raises(Crash):
        run_stages(small(), tmp_path, stage)
    assert not (target / stage / "summary.json").exists()
    monkeypatch.setattr(Run, "seal_checkpoint", seal)
    run_stages(small(), tmp_path, stage, resume=True)

    weights = "model/model.safetensors" if stage == "pretrain" else "adapter/adapter_model.safetensors"
    for name in (weights, "metrics.jsonl"):
        assert (target / stage / name).read_bytes() == (source / stage / name).read_bytes(), name
    assert read_json(target / stage / "manifest.json")["resumed_from"] == f"step-{stop_after:06d}"


def test_a_missing_adapter_is_one_clear_line(chain, tmp_path):
    target = tmp_path / "cpu-tiny/v1"
    target.mkdir(parents=True)
    for stage in ("pretrain", "data"):
        (target / stage).symlink_to(chain / "cpu-tiny/v1" / stage)
    (target / "sft").mkdir()
    for name in ("summary.json", "manifest.json"):
        (target / "sft" / name).write_bytes((chain / "cpu-tiny/v1/sft" / name).read_bytes())
    with pytest.raises(
        RunError, match=r"sft/adapter/adapter_config.json is missing since sft was done; move .*/sft away"
    ):
        run_stages(small(), tmp_path, "rm")
    assert not (target / "rm/summary.json").exists()


def test_changed_data_is_noticed(chain, tmp_path):
    target = tmp_path / "cpu-tiny/v1"
    target.mkdir(parents=True)
    for stage in ("pretrain", "sft"):
        (target / stage).symlink_to(chain / "cpu-tiny/v1" / stage)
    for file in (chain / "cpu-tiny/v1/data").rglob("*.jsonl"):
        copy = target / "data" / file.parent.name / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(RunError, match="the data has changed since"):
        run_stages(small(), tmp_path, "rm")


def test_evaluate_runs_again_when_a_new_policy_is_there(trained, tmp_path):
    target = tmp_path / "cpu-tiny/v1"
    target.mkdir(parents=True)
    for stage in ("pretrain", "sft", "rm", "data"):
        (target / stage).symlink_to(trained / "cpu-tiny/v1" / stage)
    first = run_stages(small(), tmp_path, "evaluate")
    assert not any(key.startswith("dpo/") for key in first["metrics"])
    second = run_stages(small(dpo__max_steps=1), tmp_path, "dpo", "evaluate")
    assert "dpo/true_reward" in second["metrics"]
    assert read_json(target / "evaluate.before-1/summary.json") == first
