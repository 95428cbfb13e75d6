"""The two sides of a comparison: each a process that runs stages with its own code, one question after another."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

from typing_extensions import TypedDict

from bench.against.checkout import Checkout
from bench.reading import check
from rlhf.errors import UserError
from rlhf.recipe import PinnedRecipe, StageName

WORKER = Path(__file__).with_name("worker.py")
REASON = 300  # characters of an error that are shown


class Seconds(TypedDict):
    """Seconds of a phase."""

    cpu: float  # of all threads of the process
    wall: float


class Counts(TypedDict):
    """What the operations of a phase did, as counted."""

    flops: int  # floating-point operations of matrix products
    moved: int  # bytes that other operations read and write
    launched: int  # operations that launch at least one kernel
    reads: int  # of a value by the host, for which a GPU must finish its work
    peak_bytes: int  # most that tensors held at once


class Cost(TypedDict):
    """What a stage cost: counted, or timed. Phases are known by their paths; "" is the whole stage."""

    seconds: dict[str, Seconds]
    counts: dict[str, Counts]  # empty where it was timed
    held: list[int]  # bytes alive before each step of training updates weights; empty where it was timed
    tokens: int  # that went through the model, without padding
    card_peak_bytes: dict[str, int]  # of torch's allocator, where a GPU ran the stage
    peak_rss_bytes: int  # of the process since it began


class Predicted(TypedDict):
    """What is predicted for a phase of a stage on a card."""

    flops: int
    moved: int
    launched: int
    peak_bytes: int


class _Cost(TypedDict):
    cost: Cost


class _Predictions(TypedDict):
    predicted: dict[str, dict[str, Predicted]]  # stage -> phase


class _Error(TypedDict):
    error: str


class SideFailed(UserError):
    """The code of a checkout cannot be measured."""

    def __init__(self, checkout: Checkout, reason: str):
        super().__init__(f"{checkout.name}: {reason}")
        self.checkout = checkout


class Side:
    """Context manager around the process of one side. Questions are asked with `ask_*` and answered by what follows."""

    def __init__(self, checkout: Checkout, loaded: PinnedRecipe, steps: int, shape: str):
        self.checkout = checkout
        self._loaded = loaded
        self._arguments = [str(loaded.directory.resolve()), json.dumps(loaded.overrides), str(steps), shape]
        self._folder = tempfile.TemporaryDirectory(prefix="rlhf-against-")
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process

    def __enter__(self) -> "Side":
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._process.kill()
        self._stop()
        self._errors.close()
        self._folder.cleanup()

    def restart(self) -> None:
        """Go on with a new process: where one lies in memory, and its caches, can make all it does a little slower."""
        self._stop()
        self._start()

    def _start(self) -> None:
        root = self.checkout.root
        command = [self.checkout.python, "-P", str(WORKER), *self._arguments]
        environment = os.environ | {"PYTHONPATH": str(root), "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("RLHF_COMMIT", None)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            cwd=root,
        )

    def _stop(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def wait_until_ready(self) -> None:
        """Wait for the imports. Raises SideFailed where the process runs other code than its checkout's."""
        root = json.loads(self._line())["root"]
        if Path(root).resolve() != self.checkout.root.resolve():
            raise SideFailed(self.checkout, f"its process imports {root}: unset PYTHONPATH, or reinstall rlhf")

    def ask_cost(self, stage: StageName, count: bool) -> None:
        """Ask what a stage costs, whose parents have been counted: in counts once, or then in time.

        `cost` has the answer. What a timed run has made is dropped: other stages were made from the counted result.
        """
        self._stage = Path(self._folder.name, self._loaded.name, self._loaded.version, stage)
        self._counted = None if count else self._stage.rename(Path(self._folder.name, "counted"))
        self._ask({"stage": stage, "out": self._folder.name, "count": count})

    def cost(self) -> Cost:
        """Return the answer to `ask_cost`. Raises SideFailed where the stage could not be run."""
        cost = check(self._answer(), _Cost, self.checkout.name)["cost"]
        if self._counted:
            shutil.rmtree(self._stage)
            self._counted.rename(self._stage)
        return cost

    def ask_prediction(self, recipe: Path) -> None:
        """Ask what is predicted for a card's recipe. `prediction` has the answer."""
        self._ask({"predict": str(recipe.resolve())})

    def prediction(self) -> dict[str, dict[str, Predicted]]:
        """Return the answer to `ask_prediction`, by stage and phase. Raises SideFailed where there is none."""
        return check(self._answer(), _Predictions, self.checkout.name)["predicted"]

    def _ask(self, question: dict[str, object]) -> None:
        assert self._process.stdin
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._died() from None

    def _answer(self) -> object:
        answer: object = json.loads(self._line())
        if isinstance(answer, dict) and "error" in answer:
            reason = check(answer, _Error, self.checkout.name)["error"]
            raise SideFailed(self.checkout, " ".join(reason.split())[:REASON])
        return answer

    def _line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise self._died()
        return line

    def _died(self) -> SideFailed:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines() or ["it printed nothing"]
        return SideFailed(self.checkout, f"its process ended: {lines[-1][:REASON]}")
