"""A run has the same bytes whatever the user's reward functions do, and whatever a tracker does to the generators."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from rlhf.observe import tracking
from tests.helpers import beside, grouped, run_stages

STAGE = Path("cpu-tiny/v1/grpo")
# What each of the functions does at every call, before it returns its numbers.
HOSTILE = {
    "generators": "random.seed(42); np.random.seed(42); torch.manual_seed(42)",
    "numbers": "torch.rand(3); np.random.rand(3); random.random(); random.shuffle(completions)",
    "folder": "os.chdir('/')",
    "path": "sys.path.clear()",
    "modules": "sys.modules.update({'json': None, 'trl': None}); sys.modules.pop('transformers', None)",
    "environment": "os.environ.clear(); os.environ['CUDA_VISIBLE_DEVICES'] = 'none'",
    "signals": "[signal.signal(n, signal.SIG_IGN) for n in (2, 10, 15)]; signal.set_wakeup_fd(-1)",
    "alarm": "signal.alarm(900)",
    "dtype": "torch.set_default_dtype(torch.float64)",
    "gradients": "torch.set_grad_enabled(False)",
    "device": "torch.set_default_device('meta')",
    "threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "kernels": "torch.use_deterministic_algorithms(False); torch.set_flush_denormal(True)",
    "libraries": "torch.nn.functional.softmax = torch.nn.functional.log_softmax; torch.optim.AdamW.step = None",
    "built_ins": "builtins.sorted = builtins.max = None",
    "umask": "os.umask(0o777)",
    "limits": "sys.setrecursionlimit(200); os.nice(1); resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    "texts": "warnings.simplefilter('error'); decimal.getcontext().prec = 1; locale.setlocale(0, 'C')",
    "outputs": "sys.stdout = sys.stderr = None; os.closerange(0, 1)",
    "lists": "prompts.clear(); completion_ids.clear(); completions.reverse()",
    "child": "os.fork()",
    "child_that_exits": "os.fork() or sys.exit(1)",
    "child_that_raises": "os.fork() or 1 / 0",
    "thread": "threading.Thread(target=reseed, daemon=True).start()",
    "first_call_ends": "ended or (open(MARK, 'w').close(), os._exit(1))",
}
MODULE = """
import builtins, decimal, locale, logging, os, random, resource, signal, sys, threading, time, warnings
import numpy as np
import torch
MARK = os.path.abspath("ended")
def reseed():
    while True: torch.manual_seed(0), time.sleep(0.01)
def of(texts): return [len(text) % 5 / 7 for text in texts]
"""
FUNCTION = """
def {name}(prompts, completions, completion_ids, **_):
    ended, results = os.path.exists(MARK), of(completions)
    {code}
    return results
"""


def state() -> tuple[object, ...]:
    """Some of what belongs to the process, beside its results."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)]
    settings = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device(), torch.get_num_threads()
    os.umask(mask := os.umask(0))
    return os.getcwd(), {**os.environ}, handlers, settings, mask, os.getpriority(os.PRIO_PROCESS, 0)


@contextmanager
def seeding_trackers(*_: object) -> Iterator[list[tracking.Log]]:
    """A tracker that seeds every generator when it starts, and at each row."""

    def log(step: int = 0, values: object = None) -> None:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)

    log()
    yield [log]


def test_a_run_is_as_without_what_its_rewards_do(trained, tmp_path, monkeypatch):
    results = []
    for kind in ("kind", "hostile"):
        folder = tmp_path / kind
        folder.mkdir()
        functions = (FUNCTION.format(name=n, code=code if kind == "hostile" else "") for n, code in HOSTILE.items())
        (folder / "mine.py").write_text(MODULE + "".join(functions))
        for name in ("datasets", "trl", "safetensors", "not_installed"):  # taken for libraries by a careless process
            (folder / f"{name}.py").write_text("raise SystemError\n")
        monkeypatch.chdir(folder)
        if kind == "hostile":
            monkeypatch.setattr(tracking, "trackers", seeding_trackers)
        section = {"reward_funcs": [f"mine:{name}" for name in HOSTILE], "reward_retries": 1, "normalize_scores": False}
        section |= {"steps": 2, "save_steps": 2, "eval_steps": 1}
        before = state()
        run_stages(grouped("grpo", section), beside(trained, folder / "out", "pretrain", "sft"), "grpo")
        assert state() == before
        results.append(bytes_of(folder / "out" / STAGE))
    assert results[0].keys() == results[1].keys() and len(results[0]) >= 6
    assert [name for name, content in results[0].items() if results[1][name] != content] == []
    assert (folder / "ended").exists()


def bytes_of(stage: Path) -> dict[str, bytes]:
    """The bytes of a stage's files, without those that hold times and paths."""
    timed = ("manifest.json", "summary.json", "telemetry.jsonl", "checkpoint.json")
    files = (file for file in sorted(stage.rglob("*")) if file.is_file() and file.name not in timed)
    return {str(file.relative_to(stage)): file.read_bytes() for file in files}
