"""A command of `rlhf` in a forked process with everything imported, under limits of time and memory."""

import ctypes
import gc
import importlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

CPU_SECONDS = 30  # the slowest honest case needs 4
WALL_SECONDS = 600  # a busy machine may need many
MEMORY_BYTES = 2_000_000_000  # resident, beside what the process begins with; a stage at test size takes 0.5 GB
IDLE_SECONDS = 25  # without using any CPU: it waits for something that will not come
OUTPUT_BYTES = 2_000_000  # of stdout and of stderr that are judged
FILE_BYTES = 300_000_000  # of one file that a command may write
_POLL = 0.002
_PR_SET_PDEATHSIG = 1


class Outcome(NamedTuple):
    """What a command did. `code` is negative for a signal, as in subprocess; `stopped` says which limit ended it."""

    code: int
    out: bytes
    err: bytes
    cpu: float
    peak: int
    stopped: str  # "", "time" or "memory"


def warm() -> None:
    """Import once what every command needs, so that a fork costs milliseconds."""
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    from rlhf.process.libraries import quiet_libraries

    with quiet_libraries():
        for name in ("pretrain", "sft", "rm", "ppo", "dpo", "evaluate", "merge"):
            importlib.import_module(f"rlhf.stages.{name}")
        for name in (
            "rlhf.cli",
            "rlhf.report",
            "rouge_score.rouge_scorer",
            "sacrebleu",
            "plotly.graph_objects",
            "pyarrow.parquet",
            "transformers.models.llama",
        ):
            importlib.import_module(name)
    gc.freeze()  # the collector would copy every page of what is shared


def run(
    arguments: Sequence[str],
    folder: Path,
    *,
    stdin: bytes = b"",
    inside: Callable[[], None] = lambda: None,
    watch: Callable[[int, float], None] = lambda pid, cpu: None,
) -> Outcome:
    """Run `rlhf <arguments>` with `folder` as the working directory.

    `inside` is called in the process before the command. `watch` is called with its id and the CPU seconds that it
    has used, again and again, and may kill it.
    """
    out, err, given = (folder / f".fuzz-{name}" for name in ("out", "err", "in"))
    given.write_bytes(stdin)
    started = moved = time.monotonic()
    used = 0.0
    pid = os.fork()
    if pid == 0:
        _become(arguments, folder, given, out, err, inside)
    _, shared = _usage(pid)  # the pages of the process that was forked, but those of files
    stopped = ""
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        cpu, resident = _usage(pid)
        now = time.monotonic()
        used, moved = (cpu, now) if cpu > used else (used, moved)
        over_time = cpu > CPU_SECONDS or now - started > WALL_SECONDS or now - moved > IDLE_SECONDS
        if not stopped and (over_time or resident - shared > MEMORY_BYTES):
            stopped = "time" if over_time else "memory"
            os.kill(pid, signal.SIGKILL)
        watch(pid, cpu)
        time.sleep(_POLL)
    said, errors = _head(out), _head(err)
    for file in (out, err, given):
        file.unlink(missing_ok=True)
    return Outcome(
        os.waitstatus_to_exitcode(status),
        said,
        errors,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024,
        stopped,
    )


def _become(
    arguments: Sequence[str], folder: Path, given: Path, out: Path, err: Path, inside: Callable[[], None]
) -> None:
    """Be the command; never returns."""
    code = 70
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number, file, mode in (
            (0, given, os.O_RDONLY),
            (1, out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            (2, err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND),
        ):
            os.dup2(os.open(file, mode), number)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (int(2 * CPU_SECONDS) + 1,) * 2)
        os.chdir(folder)
        os.environ["HOME"] = str(folder)
        sys.stdin = os.fdopen(0, errors="surrogateescape", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
        sys.argv = ["rlhf", *arguments]
        inside()
        code = _main()
    finally:
        os._exit(code)


def _main() -> int:
    """The exit code that the interpreter would end with."""
    from rlhf import cli

    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        traceback.print_exc()
        code = code or 120
    return code


def _usage(pid: int) -> tuple[float, int]:
    """CPU seconds and resident bytes of a process that has not been waited for, from one file: asked every 2 ms."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    return (int(fields[11]) + int(fields[12])) / ticks, int(fields[21]) * page


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as handle:
            return handle.read(OUTPUT_BYTES)
    except OSError:
        return b""
