"""What every test needs: skipped GPU tests, shared processes and chains that are trained once."""

import gc
import os
import signal
import subprocess

# Before the first import of torch: results are compared bit by bit, and two threads would fight over small tensors.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RLHF_RUNTIME"] = "local"  # a command on a recipe for a GPU would start a container

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from rlhf.plan import predict as predicting
from rlhf.plan.predict import Predictor
from rlhf.plan.rehearsal.seams import with_seams
from rlhf.process.libraries import quiet_libraries
from tests.helpers import VLLM, beside, run_stages, small

# Started in the background of a script, or by nohup, this process and all that tests start would ignore them.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests with the mark `gpu` on a machine without a CUDA device, and with `vllm` where no vLLM is named."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if item.get_closest_marker("vllm") and not os.environ.get(VLLM):
        pytest.skip("needs vLLM: make test-vllm")


@pytest.fixture(scope="module", autouse=True)
def libraries_outside_collections() -> None:
    """Python's collector skips what is alive now: libraries make a million objects, and every trainer collects."""
    gc.collect()
    gc.freeze()


# Variables that no rehearsal reads. Stages and libraries set some of them in this process, and leave them. Whether
# segments are expandable is part of what a rehearsal is asked.
NOT_READ = {
    *("PYTEST_CURRENT_TEST", "XDG_CACHE_HOME", "COLUMNS", "PYTORCH_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR"),
    *("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"),
    *("TRL_EXPERIMENTAL_SILENCE", "TOKENIZERS_PARALLELISM"),
}


@pytest.fixture(scope="session", autouse=True)
def shared_rehearsal_processes() -> Iterator[None]:
    """Predictors that are done hand their process on to the next one, because starting one imports all libraries.

    A process is only used again in the environment that it was started in.
    """
    start, leave = predicting._start_worker, Predictor.__exit__
    idle: dict[tuple[tuple[str, str], ...], subprocess.Popen[bytes]] = {}
    started_in: dict[int, tuple[tuple[str, str], ...]] = {}

    def environment() -> tuple[tuple[str, str], ...]:
        return tuple(sorted((name, value) for name, value in os.environ.items() if name not in NOT_READ))

    def take() -> subprocess.Popen[bytes]:
        process = idle.pop(environment(), None)
        if process is None or process.poll() is not None:
            process = start()
        started_in[process.pid] = environment()
        return process

    def hand_on(self: Predictor, *error: Any) -> None:
        where = started_in[self._worker.pid] if self._worker else None
        if self._worker is not None and where is not None and where not in idle:
            idle[where], self._worker = self._worker, None
        leave(self, *error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predicting, "_start_worker", take)
        patch.setattr(Predictor, "__exit__", hand_on)
        yield
    for process in idle.values():
        predictor = Predictor()
        predictor._worker = process
        leave(predictor, None, None, None)


@pytest.fixture(scope="module")
def as_in_a_worker() -> Iterator[None]:
    """Rehearsals are as in the predictor's processes: what takes no memory of the device is left out."""
    with quiet_libraries(), with_seams():
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root of a finished small chain up to the reward model; tests only read it."""
    return made_once(tmp_path_factory, "trained", lambda out: run_stages(small(), out, "pretrain", "sft", "rm"))


@pytest.fixture(scope="session")
def chain(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root of the whole finished chain, PPO, DPO, their evaluation and the merge too; tests only read it."""

    def make(out: Path) -> None:
        run_stages(small(), beside(trained, out, "pretrain", "sft", "rm"), "ppo", "dpo", "evaluate", "merge")

    return made_once(tmp_path_factory, "chain", make)


@pytest.fixture(scope="session")
def evaluated(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of the small chain with PPO and an evaluation; tests only read it."""

    def make(out: Path) -> None:
        run_stages(small(), beside(trained, out, "pretrain", "sft", "rm"), "ppo", "evaluate")

    return made_once(tmp_path_factory, "evaluated", make) / "cpu-tiny" / "v1"


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that one of the processes of a test run makes, for all of them."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(folder.with_suffix(".lock")):
        if not folder.with_suffix(".done").exists():
            make(folder)
            folder.with_suffix(".done").touch()
    return folder
