"""The whole chain at test size: the same stages, files and trainers as every recipe."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.errors import UserError
from rlhf.evaluation import compare
from rlhf.files import sha256
from rlhf.rating.pairs import pair_answers
from rlhf.run.directory import StageRun
from rlhf.run.evidence import gains_over_start
from rlhf.run.finished import read_manifest, read_summary
from rlhf.run.logs import Logs
from rlhf.run.records import Record, Settings
from tests.helpers import Crash, beside, content_of, crash, not_none, run_stages, small, undefined_metrics
from tests.lines import read_intact_lines

ADAPTERS = ("sft", "rm", "ppo", "dpo")
CHAIN = ("pretrain", "sft", "rm", "ppo", "dpo", "evaluate", "merge")


def digests(root: Path) -> dict[str, str]:
    files = [root / "cpu-tiny/v1" / stage / "adapter/adapter_model.safetensors" for stage in ADAPTERS]
    files += [root / "cpu-tiny/v1" / stage / "metrics.jsonl" for stage in ("pretrain", *ADAPTERS)]
    return {str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("chain")
    run_stages(small(), out, *CHAIN)
    return out


def test_every_stage_leaves_what_the_next_reads(chain):
    root = chain / "cpu-tiny/v1"
    for stage in CHAIN:
        summary = content_of(root / stage / "summary.json")
        assert (summary["status"], summary["stage"], summary["modified"]) == ("done", stage, True)
        assert summary["metrics"] and undefined_metrics(summary) == set(), stage
        manifest = content_of(root / stage / "manifest.json")
        assert manifest["packages"]["trl"]
        if stage not in ("evaluate", "merge"):
            assert read_intact_lines(root / stage / "metrics.jsonl")
            assert list((root / stage / "checkpoints").glob("step-*/checkpoint.json"))
    for stage in ADAPTERS:
        config = json.loads((root / stage / "adapter/adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str((root / "pretrain/model").resolve())
    assert [p.name for p in sorted((root / "ppo/checkpoints").glob("step-*"))] == [
        f"step-{n:06d}" for n in (1, 2, 3, 4)
    ]
    assert {"base/true_reward", "sft/score", "ppo/kl_per_token", "dpo/win_rate_vs_sft"} <= set(
        content_of(root / "evaluate/summary.json")["metrics"]
    )


def undeclared(record: Record) -> set[str]:
    """The keys of a record, and of records in it, that its class does not declare."""
    parts = [value for _, value in record if isinstance(value, Record) and not isinstance(value, Settings)]
    return set(record.model_extra or {}).union(*map(undeclared, parts))


def test_every_key_of_a_manifest_is_declared(chain):
    for stage in CHAIN:
        assert undeclared(read_manifest(chain / "cpu-tiny/v1" / stage)) == set(), stage


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
    assert '"\\n\\nHuman: "' in (root / "merge/Modelfile").read_text()


def test_the_page_of_a_result_has_the_gain_that_was_evaluated(chain):
    root = chain / "cpu-tiny/v1"
    gain = gains_over_start({"evaluate": not_none(read_summary(root / "evaluate"))})[0]
    assert gain.stage == "ppo"
    for page in (root / "ppo/adapter/README.md", root / "merge/model/README.md"):
        assert f"{gain.end:.4g} after; {gain.in_words()}\n" in page.read_text()


@pytest.mark.slow
def test_same_seed_same_bytes_in_another_process(chain, tmp_path):
    code = "from pathlib import Path; from tests.helpers import content_of, run_stages, small; "
    code += f"run_stages(small(), Path({str(tmp_path)!r}), 'pretrain', 'sft', 'rm', 'ppo', 'dpo')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert digests(tmp_path) == digests(chain)
    for stage in ADAPTERS:  # their configurations name the base's folder, and a set's order is another one there
        one, other = (content_of(r / "cpu-tiny/v1" / stage / "adapter/adapter_config.json") for r in (tmp_path, chain))
        assert one | {"base_model_name_or_path": ""} == other | {"base_model_name_or_path": ""}, stage


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

    stop_after = {"pretrain": 6, "ppo": 2}.get(stage, 4)
    crash(monkeypatch, stop_after)
    with pytest.raises(Crash):
        run_stages(small(), tmp_path, stage)
    assert not (target / stage / "summary.json").exists()
    monkeypatch.undo()
    run_stages(small(), tmp_path, stage, resume=True)

    weights = "model/model.safetensors" if stage == "pretrain" else "adapter/adapter_model.safetensors"
    for name in (weights, "metrics.jsonl"):
        assert (target / stage / name).read_bytes() == (source / stage / name).read_bytes(), name
    assert content_of(target / stage / "manifest.json")["resumed_from"] == f"step-{stop_after:06d}"


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
    for name in ("adapter/adapter_model.safetensors", "metrics.jsonl"):
        ours, theirs = (root / "cpu-tiny/v1/sft" / name for root in (stopped, whole))
        assert ours.read_bytes() == theirs.read_bytes(), name


def test_a_missing_adapter_is_one_clear_line(chain, tmp_path):
    target = tmp_path / "cpu-tiny/v1"
    target.mkdir(parents=True)
    for stage in ("pretrain", "data"):
        (target / stage).symlink_to(chain / "cpu-tiny/v1" / stage)
    (target / "sft").mkdir()
    for name in ("summary.json", "manifest.json"):
        (target / "sft" / name).write_bytes((chain / "cpu-tiny/v1/sft" / name).read_bytes())
    with pytest.raises(
        UserError, match=r"sft/adapter/adapter_config.json is missing since sft was done; move .*/sft away"
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
        (copy.parent / "made.json").write_bytes((file.parent / "made.json").read_bytes())
    with pytest.raises(UserError, match="has changed since it was made here"):
        run_stages(small(), tmp_path, "rm")
    for file in (target / "data").rglob("*.jsonl"):  # as if it had been made so
        hashes = {name: sha256(file.parent / name) for name in ("corpus.jsonl", "pairs.jsonl")}
        (file.parent / "made.json").write_text(json.dumps({"sha256": hashes}))
    with pytest.raises(UserError, match="the data has changed since"):
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
    assert content_of(target / "evaluate.before-1/summary.json") == first


def test_several_answers_to_each_prompt(chain, tmp_path):
    target = linked(chain, tmp_path, "data", "pretrain", "sft", "rm", "dpo")
    summary = run_stages(small(evaluate__num_samples=2), tmp_path, "evaluate")  # and DPO is taken as it is
    rows = read_intact_lines(target / "evaluate/samples.jsonl")
    assert [row["sample"] for row in rows] == [0, 1] * 8
    assert all(a["prompt"] == b["prompt"] for a, b in zip(rows[::2], rows[1::2], strict=True))
    assert sum(a["sft"] != b["sft"] for a, b in zip(rows[::2], rows[1::2], strict=True)) > 4
    scores = [row["dpo"]["score"] for row in rows]
    assert summary["metrics"]["dpo/score"] == pytest.approx(sum(scores) / len(scores), abs=1e-6)
    pairs = pair_answers(target, "sft", "dpo").pairs
    assert {rows[pair.item]["sample"] for pair in pairs} == {0} and len(pairs) > 4
    single = read_intact_lines(chain / "cpu-tiny/v1/evaluate/samples.jsonl")
    assert [row["prompt"] for row in single] == [row["prompt"] for row in rows[::2]]
    assert "sample" not in single[0]


def test_two_policies_compared_say_what_the_evaluation_says(chain):
    """PPO and DPO of one run: the differences of means are those of its metrics, and the reward model is the same."""
    root = chain / "cpu-tiny/v1"
    compared = compare.compare_runs(compare.load(root, "dpo"), compare.load(root, "ppo")).as_json()
    metrics = content_of(root / "evaluate/summary.json")["metrics"]
    rows = {row["name"]: row for row in compared["rows"]}
    for key in ("score", "true_reward", "perplexity", "kl_per_token"):
        assert rows[key]["a"] == pytest.approx(metrics[f"dpo/{key}"], abs=1e-6)
        expected = metrics[f"ppo/{key}"] - metrics[f"dpo/{key}"]
        assert rows[key]["difference"] == pytest.approx(expected, abs=1e-6)
    assert compared["reward_model"] and compared["settings_that_differ"] == [] and compared["prompts"] == 8
    assert (rows["rm/accuracy"]["difference"], rows["rm/accuracy"]["interval"]) == (0, None), "one reward model"


def linked(chain: Path, folder: Path, *stages: str) -> Path:
    """A root whose named stages are those of `chain`, and whose data folder is its own."""
    target = folder / "cpu-tiny/v1"
    target.mkdir(parents=True)
    for stage in stages:
        (target / stage).symlink_to(chain / "cpu-tiny/v1" / stage)
    return target


def test_other_toy_settings_get_other_data(trained, tmp_path):
    """Data of another seed that lies about in the root is never taken for ours."""
    linked(trained, tmp_path, "data")
    run_stages(small(seed=4), tmp_path, "pretrain")
    ours = content_of(tmp_path / "cpu-tiny/v1/pretrain/manifest.json")["data"]
    assert ours["sha256"] != content_of(trained / "cpu-tiny/v1/pretrain/manifest.json")["data"]["sha256"]


def test_what_was_made_from_another_policy_is_made_again(chain, tmp_path):
    target = linked(chain, tmp_path, "data", "pretrain", "sft", "rm")
    run_stages(small(), tmp_path, "ppo", "merge", "evaluate")
    before = {name: content_of(target / name / "summary.json") for name in ("merge", "evaluate")}
    (target / "ppo").rename(tmp_path / "old-ppo")
    run_stages(small(ppo__kl_coef=0.5), tmp_path, "ppo")
    with pytest.raises(UserError, match=r"merge was made with ppo\.kl_coef .* \(asked for: 0\.5\)"):
        run_stages(small(ppo__kl_coef=0.5), tmp_path, "merge")  # other settings: never overwritten
    evaluated = run_stages(small(ppo__kl_coef=0.5), tmp_path, "evaluate")
    assert evaluated["metrics"]["ppo/kl_per_token"] != before["evaluate"]["metrics"]["ppo/kl_per_token"]
    assert content_of(target / "evaluate.before-1/summary.json") == before["evaluate"]


def test_a_stage_made_from_another_parent_is_not_taken_for_done(chain, tmp_path):
    target = linked(chain, tmp_path, "data", "pretrain")
    run_stages(small(), tmp_path, "sft")
    shutil.copytree(chain / "cpu-tiny/v1/rm", target / "rm")
    with pytest.raises(UserError, match="rm was made from another sft"):  # equal settings, but a run of its own
        run_stages(small(), tmp_path, "rm")


def test_a_damaged_result_of_a_parent_is_noticed(chain, tmp_path):
    target = linked(chain, tmp_path, "data", "pretrain")
    shutil.copytree(chain / "cpu-tiny/v1/sft", target / "sft")
    file = target / "sft/adapter/adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"adapter_model.safetensors has changed since sft was done"):
        run_stages(small(), tmp_path, "rm")


def test_resume_refuses_data_that_changed_meanwhile(tmp_path, monkeypatch):
    rows = [{"text": f"Number {n} is followed by {n + 1}."} for n in range(60)]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = small(data__source="files", data__files=[str(file)])
    crash(monkeypatch, after=6)
    with pytest.raises(Crash):
        run_stages(loaded, tmp_path, "pretrain")
    monkeypatch.undo()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:50]))
    with pytest.raises(UserError, match="the data has changed since"):
        run_stages(loaded, tmp_path, "pretrain", resume=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_stages(loaded, tmp_path, "pretrain", resume=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:50]))
    with pytest.raises(UserError, match=r"pretrain was made from another .*texts\.jsonl"):
        run_stages(loaded, tmp_path, "pretrain")


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(self, step, folder):
        raise RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file")

    monkeypatch.setattr(StageRun, "seal_checkpoint", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(UserError, match="pretrain: the disk is full; make room and continue with --resume"):
        run_stages(small(), tmp_path, "pretrain")


def test_a_bug_on_a_full_disk_stays_a_bug(tmp_path, monkeypatch):
    def broken(self, step, folder):
        raise KeyError("step")

    monkeypatch.setattr(StageRun, "seal_checkpoint", broken)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(KeyError):
        run_stages(small(), tmp_path, "pretrain")


def test_wall_time_of_a_resumed_run_counts_what_went_before(chain, tmp_path, monkeypatch):
    target = linked(chain, tmp_path, "data", "pretrain")
    crash(monkeypatch, after=4)
    with pytest.raises(Crash):
        run_stages(small(), tmp_path, "sft")
    monkeypatch.undo()
    record = target / "sft/checkpoints/step-000004/checkpoint.json"
    spent = content_of(record)
    record.write_text(json.dumps(spent | {"wall_seconds": 1000.0}))
    assert run_stages(small(), tmp_path, "sft", resume=True)["wall_seconds"] > 1000


def test_a_resumed_run_has_each_step_once_in_tensorboard(chain, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard comes with the tracking extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    target = linked(chain, tmp_path, "data", "pretrain", "sft", "rm")
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
    events = EventAccumulator(str(target / "ppo/tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("objective/scores")] == [1, 2, 3, 4]


def test_metrics_go_to_tensorboard_when_asked(chain, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard comes with the tracking extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    target = linked(chain, tmp_path, "data", "pretrain", "sft", "rm")
    run_stages(small(), tmp_path, "ppo", report_to=["tensorboard"])
    events = EventAccumulator(str(target / "ppo/tensorboard"))
    events.Reload()
    seen = [(event.step, round(event.value, 5)) for event in events.Scalars("objective/scores")]
    logged = [
        (row["step"], round(row["objective/scores"], 5)) for row in read_intact_lines(target / "ppo/metrics.jsonl")
    ]
    assert [step for step, _ in seen] == [step for step, _ in logged]
    assert [value for _, value in seen] == pytest.approx([value for _, value in logged], abs=1e-4)
    assert (target / "ppo/metrics.jsonl").read_bytes() == (chain / "cpu-tiny/v1/ppo/metrics.jsonl").read_bytes()
