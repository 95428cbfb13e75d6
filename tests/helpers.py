"""A chain small enough for tests, the released CPU recipe with its sizes turned down, and what many tests share."""

import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch

from rlhf import cli, recipe
from rlhf.data.corpus import Corpus, Prompt
from rlhf.files import read_json
from rlhf.process import task as tasks
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.stages import stage_name
from rlhf.run.directory import StageRun
from rlhf.stages import runner

T = TypeVar("T")
VLLM = "RLHF_VLLM"  # the variable that names the command of a vLLM that tests start
RECIPE = Path(__file__).parents[1] / "recipes" / "cpu-tiny" / "v1"
FIXTURES = Path(__file__).parent / "recipes"  # recipes that only tests run
SMALL: dict[str, Any] = {
    "hardware.threads": 1,
    "model.architecture.hidden_size": 32,
    "model.architecture.intermediate_size": 64,
    "model.architecture.num_hidden_layers": 2,
    "model.architecture.num_attention_heads": 2,
    "model.architecture.num_key_value_heads": 2,
    "tokenizer.vocab_size": 400,
    "data.toy.documents": 300,
    "data.toy.pairs": 300,
    "lora.r": 4,
    "pretrain.max_steps": 12,
    "pretrain.logging_steps": 3,
    "pretrain.save_steps": 6,
    "pretrain.max_eval_samples": 16,
    **{
        f"{stage}.{key}": value
        for stage in ("sft", "rm", "dpo")
        for key, value in {
            "max_samples": 64,
            "max_eval_samples": 16,
            "per_device_train_batch_size": 8,
            "logging_steps": 2,
            "save_steps": 4,
        }.items()
    },
    "ppo.steps": 4,
    "ppo.batch_size": 8,
    "ppo.per_device_train_batch_size": 4,
    "ppo.rollout_batch_size": 8,
    "ppo.response_length": 12,
    "ppo.norm_responses": 16,
    "ppo.warmup_steps": 1,
    "ppo.save_steps": 1,
    "ppo.eval_steps": 2,
    "ppo.max_eval_samples": 8,
    "evaluate.max_samples": 8,
    "evaluate.batch_size": 8,
    "evaluate.response_length": 12,
}
# The supervised stages in two steps each, where a test is about what a chain reads and writes.
TWO_STEPS: dict[str, Any] = {f"{stage}__max_samples": 16 for stage in ("sft", "rm", "dpo")}
# A section of RLOO or GRPO at test size, whose learning rate shows within a few steps.
GROUP: dict[str, Any] = {
    "steps": 4,
    "batch_size": 8,
    "num_generations": 4,
    "num_mini_batches": 2,
    "per_device_train_batch_size": 4,
    "rollout_batch_size": 8,
    "max_prompt_length": 64,
    "max_completion_length": 12,
    "temperature": 1.0,
    "beta": 0.05,
    "normalize_scores": True,
    "norm_responses": 8,
    "missing_eos_penalty": 1.0,
    "learning_rate": 0.003,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
    "gradient_checkpointing": False,
    "max_samples": None,
    "max_eval_samples": 8,
    "logging_steps": 1,
    "save_steps": 1,
    "eval_steps": 2,
}


def grouped(stage: str, group: dict[str, Any] | None = None, **changes: Any) -> PinnedRecipe:
    """The CPU recipe at test size with a section `rloo` or `grpo`; `group` changes keys of it."""
    return small(**{stage: GROUP | (group or {})}, **changes)


def small(**changes: Any) -> PinnedRecipe:
    """The CPU recipe at test size; `changes` name keys with double underscores: ppo__steps=2."""
    return recipe.load(RECIPE, SMALL | {key.replace("__", "."): value for key, value in changes.items()})


def run_stages(loaded: PinnedRecipe, out: Path, *names: str, **options: Any) -> dict[str, Any]:
    """Run the named stages; returns the last one's summary."""
    summary: dict[str, Any] = {}
    for name in names:
        record, _ = runner.execute(tasks.task_of(loaded, stage_name(name), out, **options), loaded)
        assert record is not None
        summary = record.plain()
    return summary


def rlhf(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of `rlhf <arguments>`."""
    return called(monkeypatch, capsys, cli.main, "rlhf", *arguments)


def task_of(words: Sequence[str]) -> tasks.Task:
    """What a child process of `rlhf` is to run, by its command line; the file is there as long as the child."""
    assert list(words[-3:-1]) == ["run", "--resolved"], words
    return tasks.read(Path(words[-1]))


def called(monkeypatch, capsys, program: Callable[[], object], *words: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a program in this process; `words` are its name and its arguments."""
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    code = 0
    try:
        program()
    except SystemExit as stop:
        code = 1 if isinstance(stop.code, str) else int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def corpus_of(answers: dict[Prompt, str] | None = None, columns: Any = None) -> Corpus:
    """What reward functions read of the rows: right answers, and what `columns` gives for the names of some."""
    return cast(Corpus, SimpleNamespace(right_answers=lambda: answers or {}, columns=columns or (lambda names: {})))


def beside(trained: Path, out: Path, *stages: str) -> Path:
    """A run directory that shares finished stages with another one."""
    root = Path("cpu-tiny/v1")
    (out / root).mkdir(parents=True, exist_ok=True)
    for name in ("data", *stages):
        (out / root / name).symlink_to(trained / root / name)
    return out


def toy_pairs(trained: Path) -> Path:
    """The pairs that the small recipe made; other tests leave data of other settings beside them."""
    files = content_of(trained / "cpu-tiny/v1/pretrain/manifest.json")["data"]["files"]
    return trained / "cpu-tiny/v1/data" / Path(files[0]["name"]).parent.name / "pairs.jsonl"


class Crash(Exception):
    """Stands for a power cut."""


def crash(monkeypatch, after: int) -> None:
    """Let the next stage die once the checkpoint of step `after` is sealed."""
    seal = StageRun.seal_checkpoint

    def sealed_then_dead(self, step, folder):
        seal(self, step, folder)
        if step == after:
            raise Crash

    monkeypatch.setattr(StageRun, "seal_checkpoint", sealed_then_dead)


def content_of(file: Path) -> dict[str, Any]:
    """The object in a JSON file that must be there."""
    content = read_json(file)
    assert content is not None, f"{file} cannot be read"
    return content


def undefined_metrics(summary: dict[str, Any]) -> set[str]:
    """The metrics of a summary that have no value: it stores NaN and infinity as null."""
    return {key for key, value in summary["metrics"].items() if value is None}


def one_line_of(caught: pytest.ExceptionInfo[BaseException]) -> str:
    """An error's message, which must be one line that fits a screen, wherever pytest has its temporary folders."""
    message = str(caught.value)
    short = re.sub(r"/\S*/pytest-\d+/[^\s:,']*/", "", message)
    assert "\n" not in message and message.isprintable() and len(short) < 700, message
    return message


def not_none(x: T | None) -> T:
    """`x`, which must not be None."""
    assert x is not None
    return x


def wait_until(true: Callable[[], bool], pause: float = 0.01) -> None:
    """Return once `true()` holds, which is looked for every `pause` seconds. A loaded machine may take any time."""
    while not true():
        time.sleep(pause)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        number: int = listener.getsockname()[1]
        return number


def gradient(x: torch.Tensor) -> torch.Tensor:
    """The gradient of a tensor that has one."""
    assert x.grad is not None
    return x.grad


def noted(notes: list[Any], note: Any, result: T) -> T:
    """`result`, once `note` has been added to `notes`: what a stand-in written as a lambda returns."""
    notes.append(note)
    return result
