"""Trackers: metrics are also sent elsewhere, and no tracker ends a run."""

import sys
import types
from pathlib import Path
from typing import Any

import accelerate.tracking  # noqa: F401  # before modules of other names stand in for services
import pytest

from rlhf.errors import UserError
from rlhf.observe import tracking


def service(**functions: Any) -> Any:
    """A module such as wandb, whose runs have these functions; others do nothing."""
    run = types.SimpleNamespace(**({"log": lambda *_, **__: None, "finish": lambda: None} | functions))
    return types.SimpleNamespace(init=functions.get("init", lambda **_: run))


def opened(folder: Path, *names: str) -> Any:
    return tracking.trackers(names, folder, "cpu-tiny-v1", "sft-seed0")


def test_wandb_gets_rows_and_writes_beside_the_run_s_other_files(tmp_path, monkeypatch):
    logged: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda: logged.append("finished")
    )
    started: list[Any] = []

    def init(**options: Any) -> Any:
        started.append(options)
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with opened(tmp_path, "wandb") as logs:
        for log in logs:
            log(3, {"loss": 0.5})
    assert started == [{"project": "cpu-tiny-v1", "name": "sft-seed0", "dir": str(tmp_path)}]
    assert logged == [(3, {"loss": 0.5}), "finished"]


def test_tensorboard_s_files_lie_in_the_run(tmp_path):
    pytest.importorskip("tensorboard")
    with opened(tmp_path, "tensorboard") as (log,):
        log(1, {"loss": 0.5})
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_others_are_closed_where_one_does_not_start(tmp_path, monkeypatch):
    def fail(**options: object) -> None:
        raise OSError("no network")

    closed: list[bool] = []
    monkeypatch.setitem(sys.modules, "wandb", service(finish=lambda: closed.append(True)))
    monkeypatch.setitem(sys.modules, "trackio", service(init=fail))
    with pytest.raises(UserError, match=r"--report-to trackio: .*no network"), opened(tmp_path, "wandb", "trackio"):
        pytest.fail("the block is not entered")
    assert closed == [True]


def test_a_tracker_that_fails_is_said_once_and_ends_nothing(tmp_path, monkeypatch, capsys):
    def fail(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "wandb", service(log=fail))
    with opened(tmp_path, "wandb") as (log,):
        log(1, {"loss": 0.5}), log(2, {"loss": 0.4})
    (line,) = capsys.readouterr().err.splitlines()
    assert "wandb" in line and "no network" in line
