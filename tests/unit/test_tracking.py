"""Trackers: metrics are also sent elsewhere, and no tracker ends a run."""

import sys
import types
from contextlib import nullcontext

import pytest

from rlhf.errors import UserError
from rlhf.observe import tracking
from tests.helpers import beside, noted, run_stages, small


def test_wandb_writes_beside_the_run_s_other_files(tmp_path, monkeypatch):
    started, logged = [], []
    wandb = types.SimpleNamespace(
        init=lambda **options: started.append(options),
        log=lambda values, step: logged.append((step, values)),
        finish=lambda: started.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with tracking.trackers(["wandb"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {"seed": 0}) as logs:
        for log in logs:
            log(3, {"loss": 0.5})
    named = {"project": "cpu-tiny-v1", "name": "sft-seed0"}
    expected = named | {"config": {"seed": 0}, "dir": str(tmp_path / "sft")}
    assert started == [expected, "finished"]
    assert logged == [(3, {"loss": 0.5})]


def test_a_tracker_is_closed_when_another_does_not_start_or_close(tmp_path, monkeypatch, capsys):
    def fail(**options):
        raise OSError("no network")

    closed = []
    module = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "wandb", module(init=dict, finish=lambda exit_code=0: closed.append(exit_code)))
    monkeypatch.setitem(sys.modules, "trackio", module(init=fail, finish=fail))
    with (
        pytest.raises(UserError, match="trackio: no network"),
        tracking.trackers(["wandb", "trackio"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {}),
    ):
        pass
    monkeypatch.setitem(sys.modules, "trackio", module(init=dict, finish=fail))
    with tracking.trackers(["wandb", "trackio"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {}):
        pass
    assert closed == [1, 0]
    assert "trackio could not be closed: no network" in capsys.readouterr().err


def test_a_tracker_that_fails_gets_no_more_rows_and_ends_no_run(tmp_path, monkeypatch, capsys):
    """The stage's own logs have everything."""

    def fail(row, step):
        sent.append(step)
        raise ConnectionError("no network")

    sent: list[int] = []
    trackio = types.SimpleNamespace(init=dict, finish=dict, log=fail)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    with tracking.trackers(["trackio"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {}) as (record,):
        record(1, {"loss": 0.5})
        record(2, {"loss": 0.4})
    assert sent == [1]
    assert capsys.readouterr().err.count("trackio gets no more metrics: no network") == 1


def test_trackers_name_a_run_after_recipe_stage_and_seed(trained, tmp_path, monkeypatch):
    opened: list[tuple[object, ...]] = []
    monkeypatch.setattr(tracking, "trackers", lambda *arguments: noted(opened, arguments, nullcontext([])))
    out = beside(trained, tmp_path / "runs", "pretrain")
    run_stages(small(sft__max_samples=16), out, "sft")
    ((_, _, project, name, _, first_step),) = opened
    assert (project, name, first_step) == ("cpu-tiny-v1", "cpu-tiny-v1-sft-seed0", None)


@pytest.mark.parametrize("fails", ["init", "log"])
def test_tensorboard_ends_no_run_either(tmp_path, monkeypatch, capsys, fails):
    class Writer:
        def __init__(self, folder: str, purge_step: int | None):
            if fails == "init":
                raise OSError("no room")

        def add_scalar(self, *_: object) -> None:
            raise OSError("no room")

        def close(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    opened = tracking.trackers(["tensorboard"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {})
    if fails == "init":
        with pytest.raises(UserError, match="--report-to tensorboard: no room"), opened:
            pass
        return
    with opened as (record,):
        record(1, {"loss": 0.5})
        record(2, {"loss": 0.4})
    assert capsys.readouterr().err.count("tensorboard gets no more metrics: no room") == 1


def test_only_wandb_is_told_that_a_stage_has_failed(tmp_path, monkeypatch):
    """It would list the run as finished. Trackio's function takes nothing."""
    closed = []
    wandb = types.SimpleNamespace(init=dict, finish=lambda exit_code=0: closed.append(exit_code))
    trackio = types.SimpleNamespace(init=dict, finish=lambda: closed.append("trackio"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    with (
        pytest.raises(MemoryError),
        tracking.trackers(["wandb", "trackio"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {}),
    ):
        raise MemoryError
    with tracking.trackers(["wandb"], tmp_path / "sft", "cpu-tiny-v1", "sft-seed0", {}):
        pass
    assert closed == ["trackio", 1, 0]
