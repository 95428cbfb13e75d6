"""Checkpoints and logs that a resumed run cannot trust: refused in one line, passed over, or left alone.

A changed file is named by its new hash in checkpoint.json, as if whoever changed it had done that too.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.errors import UserError
from rlhf.files import sha256
from tests.helpers import Crash, beside, content_of, crash, one_line_of, run_stages, small

ROOT = Path("cpu-tiny/v1")
STEP = {"pretrain": 6, "sft": 4, "dpo": 4, "ppo": 2}


@pytest.fixture(scope="module")
def interrupted(trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that stopped behind the checkpoint of STEP."""
    out = tmp_path_factory.mktemp("interrupted")
    for stage, step in STEP.items():
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
            crash(patch, step)
            parents = [name for name in ("pretrain", "sft", "rm") if name != stage]
            run_stages(small(), beside(trained, out / stage, *(parents if stage != "pretrain" else ())), stage)
    return out


def resumable(interrupted: Path, out: Path, stage: str) -> Path:
    """A copy of an interrupted run; returns the folder of its newest checkpoint."""
    shutil.copytree(interrupted / stage, out, symlinks=True, dirs_exist_ok=True)
    return out / ROOT / stage / "checkpoints" / f"step-{STEP[stage]:06d}"


def seal(folder: Path) -> None:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "checkpoint.json"]
    record = json.loads((folder / "checkpoint.json").read_text())
    record["sha256"] = {str(file.relative_to(folder)): sha256(file) for file in files}
    (folder / "checkpoint.json").write_text(json.dumps(record))


class Harmful:
    def __reduce__(self):
        return (Path.touch, (Path("unpickled"),))


def put(name: str, content: Any) -> Callable[[Path], None]:
    """Write an object with torch.save, or bytes as they are."""

    def damage(folder: Path) -> None:
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            torch.save(content, folder / name)

    return damage


def change(name: str, edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Edit what torch.save wrote."""

    def damage(folder: Path) -> None:
        with torch.serialization.safe_globals([]):
            state = torch.load(folder / name, weights_only=False)
        edit(state)
        torch.save(state, folder / name)

    return damage


def json_keys(name: str, **keys: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | keys
        (folder / name).write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))

    return damage


def tensors(name: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        found = load_file(folder / name)
        edit(found)
        save_file(found, folder / name, {"format": "pt"})

    return damage


def pickled_instead(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"x": Harmful()}, folder / "adapter_model.bin")


def first(found: dict[Any, Any]) -> Any:
    return found[sorted(found)[0]]


REFUSED = "it holds other objects than tensors and numbers, or is damaged"
ADAPTER = "adapter_model.safetensors"
MOMENT = "exp_avg of parameter 0"
DAMAGES = [
    ("ppo", put("state.pt", {"x": Harmful()}), f"state.pt: cannot be read .{REFUSED}", "pick-ppo-state.pt"),
    ("ppo", put("state.pt", pickle.dumps(Harmful())), f"state.pt: cannot be read .{REFUSED}", "pick-raw"),
    ("sft", put("optimizer.pt", {"x": Harmful()}), f"optimizer.pt: cannot be read .{REFUSED}", "pick-sft-optimizer.pt"),
    ("sft", put("scheduler.pt", {"x": Harmful()}), f"scheduler.pt: cannot be read .{REFUSED}", "pick-sft-scheduler.pt"),
    ("sft", put("rng_state.pth", {"x": Harmful()}), f"cannot be read .{REFUSED}", "pick-sft-rng_state.pth"),
    ("sft", put("pytorch_model.bin", {"x": Harmful()}), "pytorch_model.bin is a pickle", "pick-sft-pytorch_model.bin"),
    ("sft", put("trainer_state.json", b"garbage"), "trainer_state.json: cannot be read", "trainer_state.json_garbage"),
    (
        "sft",
        json_keys("trainer_state.json", max_steps=None),
        "trainer_state.json: max_steps",
        "trainer_state.json_types",
    ),
    (
        "sft",
        json_keys("trainer_state.json", log_history=...),
        "key 'log_history' is missing",
        "trainer_state.json_keys",
    ),
    ("sft", json_keys("trainer_state.json", global_step=2), "that of another step", "trainer_state.json_step"),
    ("sft", put(ADAPTER, b"\xff" * 99), "adapter_model.safetensors: cannot be read", "adapter_garbage"),
    ("sft", pickled_instead, "adapter_model.bin is a pickle", "adapter_missing_bin"),
    ("sft", lambda folder: (folder / ADAPTER).unlink(), "adapter_model.safetensors is missing", "adapter_missing"),
    ("sft", tensors(ADAPTER, lambda t: t.pop(sorted(t)[0])), "lacks base_model", "adapter_key"),
    ("sft", tensors(ADAPTER, lambda t: first(t).fill_(float("nan"))), "holds NaN or infinity", "adapter_nan"),
    ("sft", json_keys("adapter_config.json", peft_type="EVIL"), "peft_type: input should be 'LORA'", "adapter_config"),
    (
        "sft",
        change("optimizer.pt", lambda s: s.pop("param_groups")),
        "key 'param_groups' is missing",
        "optimizer_groups",
    ),
    (
        "sft",
        change("optimizer.pt", lambda s: s["param_groups"][0]["params"].pop()),
        "parameters, but the model trains",
        "optimizer_count",
    ),
    (
        "sft",
        change("optimizer.pt", lambda s: first(s["state"]).update(exp_avg=torch.zeros(3))),
        f"optimizer.pt has another shape of {MOMENT}",
        "optimizer_shape",
    ),
    (
        "sft",
        change("optimizer.pt", lambda s: first(s["state"])["exp_avg"].fill_(float("nan"))),
        f"optimizer.pt: {MOMENT} holds NaN",
        "optimizer_nan",
    ),
    ("sft", change("scheduler.pt", lambda s: s.update(last_epoch="x")), "scheduler.pt: last_epoch", "scheduler_types"),
    ("sft", change("rng_state.pth", lambda s: s.pop("cpu")), "cannot be read .'cpu'", "rng_keys"),
    ("sft", change("rng_state.pth", lambda s: s.update(cpu=torch.zeros(3))), "cannot be read", "rng_types"),
    ("dpo", put("optimizer.pt", {"x": Harmful()}), f"optimizer.pt: cannot be read .{REFUSED}", "pick-dpo-optimizer.pt"),
    ("dpo", put("rng_state.pth", {"x": Harmful()}), f"cannot be read .{REFUSED}", "pick-dpo-rng_state.pth"),
    ("dpo", tensors(f"ref/{ADAPTER}", lambda t: t.clear()), f"ref/{ADAPTER} lacks", "dpo_reference"),
    ("pretrain", tensors("model.safetensors", lambda t: t.pop("model.norm.weight")), "lacks model.norm", "model_key"),
    ("pretrain", tensors("model.safetensors", lambda t: first(t).fill_(float("inf"))), "holds NaN or", "model_inf"),
    ("ppo", change("state.pt", lambda s: s.pop("norm")), "state.pt: key 'norm' is missing", "state-no-norm"),
    ("ppo", change("state.pt", lambda s: s["policy"].pop()), "state.pt: policy lacks tensor", "state-shape"),
    (
        "ppo",
        change("state.pt", lambda s: s["value"].append(torch.ones(1))),
        "value has an unknown weight",
        "state-extra",
    ),
    (
        "ppo",
        change("state.pt", lambda s: s["policy"].__setitem__(0, torch.ones(2, 2))),
        "policy has another shape of tensor 0",
        "state-shape2",
    ),
    (
        "ppo",
        change("state.pt", lambda s: s["value"][0].fill_(float("nan"))),
        "value: tensor 0 holds NaN",
        "state-nan",
    ),
    ("ppo", change("state.pt", lambda s: s.update(step="x")), "step: input should be a valid integer", "state-step"),
    ("ppo", change("state.pt", lambda s: s.update(step="")), "step: input should be a valid integer", "state-step2"),
    (
        "ppo",
        change("state.pt", lambda s: s.update(step=7)),
        "state.pt holds step 7, but its folder is named for step 2",
        "state-step3",
    ),
    ("ppo", change("state.pt", lambda s: s.update(norm=(0.0, float("nan")))), "norm.1: ", "state-norm-nan"),
    ("ppo", change("state.pt", lambda s: s.update(optimizer={})), "key 'optimizer.state' is missing", "state-opt"),
    (
        "ppo",
        change("state.pt", lambda s: first(s["optimizer"]["state"]).update(exp_avg=torch.zeros(9))),
        f"state.pt has another shape of {MOMENT}",
        "state-opt2",
    ),
    ("ppo", change("state.pt", lambda s: s["random"].pop("torch")), "key 'random.torch' is missing", "state-rand"),
    ("ppo", change("state.pt", lambda s: s["random"].update(python=(1,))), "state.pt: cannot be read", "state-rand2"),
    ("ppo", put("state.pt", [1, 2]), "state.pt: not an object", "state-list"),
]


@pytest.mark.parametrize(("stage", "damage", "said"), [pytest.param(*d[:3], id=d[3]) for d in DAMAGES])
def test_a_checkpoint_that_cannot_be_used_is_one_line(interrupted, tmp_path, monkeypatch, stage, damage, said):
    monkeypatch.chdir(tmp_path)
    folder = resumable(interrupted, tmp_path / "out", stage)
    damage(folder)
    seal(folder)
    with pytest.raises(UserError, match=said) as caught:
        run_stages(small(), tmp_path / "out", stage, resume=True)
    assert f"move {folder} away, and --resume takes the checkpoint before it" in one_line_of(caught)
    assert not (tmp_path / "unpickled").exists()


def test_a_checkpoint_with_a_file_too_many_is_passed_over(interrupted, tmp_path, capsys):
    """transformers would load it instead of the adapter. The checkpoint before it is taken."""
    folder = resumable(interrupted, tmp_path, "ppo")
    put("pytorch_model.bin", b"x")(folder)
    run_stages(small(), tmp_path, "ppo", resume=True)
    assert f"{folder} cannot be used (pytorch_model.bin does not belong to it)" in capsys.readouterr().err
    assert content_of(tmp_path / ROOT / "ppo/manifest.json")["resumed_from"] == "step-000001"


def test_nan_in_a_log_is_a_missing_value(interrupted, tmp_path):
    root = resumable(interrupted, tmp_path, "ppo").parents[1]
    rows = (root / "metrics.jsonl").read_text().splitlines()
    rows[0] = json.dumps(json.loads(rows[0]) | {"objective/kl": float("nan"), "loss/value_avg": float("inf")})
    (root / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    run_stages(small(), tmp_path, "ppo", resume=True)
    row = json.loads((root / "metrics.jsonl").read_text().splitlines()[0])
    assert row["objective/kl"] is None and row["loss/value_avg"] is None


def test_a_summary_that_is_damaged_is_not_taken_for_an_unfinished_run(trained, tmp_path):
    shutil.copytree(trained / ROOT / "sft", tmp_path / ROOT / "sft")
    beside(trained, tmp_path, "pretrain")
    (tmp_path / ROOT / "sft/summary.json").write_text('{"schema": 1, "rec')
    with pytest.raises(UserError, match=r"summary.json: cannot be read .*; move .*/sft away and run sft again"):
        run_stages(small(), tmp_path, "sft")
