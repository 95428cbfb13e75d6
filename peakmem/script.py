"""A program as it is, followed on a stand-in: its phases and steps, who made each tensor, and where it ends.

A program that makes a model of many equal layers may be run with few of them (`Stack`).
"""

import contextlib
import functools
import gc
import importlib.metadata
import math
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data.dataloader import _BaseDataLoaderIter

from peakmem import cuda, foreign, kernels
from peakmem.batches import STEPS, Batches, Seen
from peakmem.cards import Card
from peakmem.depth import releases_in_order
from peakmem.device import StandIn
from peakmem.events import PASS, Event, NotPredicted, Peak, StorageKind
from peakmem.patches.replacing import Replaced
from peakmem.stacks import Stack, Stacks
from peakmem.tensors import META, Args, Kwargs, Op, on_stand_in, tensors_in

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd  # of operations that are made of others
OURS = str(Path(__file__).parent) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
PLAIN_PYTHON = str(Path(os.__file__).parent) + os.sep
ASKS_DRIVER = re.compile(r"NVIDIA driver|CUDA driver|not compiled with CUDA|libcuda|without CUDA")
HOST = 2**22  # numbers of a floating tensor on the host from which on they are not computed: no size depends on them
FOLLOWED_LIBRARIES = (
    *("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "diffusers", "timm", "torchvision"),
    *("lightning", "litgpt", "torchtune", "torchao", "liger_kernel", "flash_attn", "triton"),
)
LEAST_VOCABULARY = 1000
EAGER = "torch.compile is left out: an eager run takes more memory, nearly always"
GRAPHS = {"reduce-overhead", "max-autotune", "triton.cudagraphs"}  # modes and options of torch.compile
# What makes a program another than the one that is followed, by where it begins.
REFUSED = (
    ("torch.distributed.distributed_c10d:rendezvous", "several processes (torch.distributed)"),
    ("torch.distributed.distributed_c10d:_new_process_group_helper", "several processes (torch.distributed)"),
    ("torch.multiprocessing.spawn:start_processes", "several processes (torch.multiprocessing)"),
    ("torch.multiprocessing:start_processes", "several processes (torch.multiprocessing)"),
    ("torch._dynamo.eval_frame:_optimize", "torch._dynamo.optimize"),
)


class Made(NamedTuple):
    """Where an allocation was made: its line, its shape and its type."""

    line: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Record:
    """What a followed run leaves, by which it is reported; everything can be pickled."""

    events: list[Event] = field(default_factory=list)
    components: list[StorageKind] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    peaks: dict[str, Peak] = field(default_factory=dict)
    stack: Stack | None = None  # the largest
    steps: int = 0
    assumed: Counter[str] = field(default_factory=Counter)  # what was, or is not counted, and how often
    seen: Seen | None = None  # of the batches; None where no DataLoader was read
    unread: list[str] = field(default_factory=list)  # lines that made a DataLoader whose data was not read
    later: list[str] = field(default_factory=list)  # what the program is set to do after the steps
    versions: dict[str, str] = field(default_factory=dict)  # of the libraries that the program has imported
    refused: str | None = None
    failed: str | None = None  # by an error of the program
    crashed: str | None = None  # by a fault of this package
    ended: str = ""


class _Launched(BaseException):
    """A program has started Python with another one, as launchers do: that one is followed in its place."""

    def __init__(self, command: list[str], environment: Mapping[str, str] | None):
        super().__init__(command)
        self.command, self.environment = command, environment


class Followed(StandIn):
    """The stand-in for a card under a program that says `cuda`.

    It ends the run after `steps` optimizer steps. `layers` is what becomes of a stack of equal layers; with `probing`,
    the run ends at the first pass of a model with a stack that is worth short runs. `keep` gets the record at the end,
    and does not return: a program might catch an exception, and tidy up.
    """

    as_cuda = True

    def __init__(
        self,
        card: Card,
        steps: int,
        stack: Stack | None,
        layers: int,
        probing: bool,
        keep: Callable[[Record], NoReturn],
        batches: Batches | None = None,
    ):
        super().__init__("cuda", (), 0, card.gpu, lambda _: self._of_program(card))
        self._logit_widths = set()
        self.record = Record(stack=stack)
        self._stacks = Stacks(stack, layers, self._leave_out)
        self._most_steps, self._probing = steps, probing
        self.alive = self.most = 0  # bytes
        self._within = 0  # calls of modules that are open
        self._in_backward = False
        self._backwards = 0
        self._known_lines: dict[str, bool] = {}
        self._launched: set[int] = set()  # operations, by id
        self._left_out: set[int] = set()  # storages of layers that a shortened model lacks
        self._keep, self._batches = keep, batches

    # -- what torch.cuda answers with ------------------------------------------------------------------------------

    def reset_most(self) -> None:
        """Let the most bytes so far be those that are alive."""
        self.most = self.alive

    def allocate(self, size: int, operation: str) -> int:
        """Record an allocation, and the line that made it."""
        number = super().allocate(size, operation)
        self.alive += self._storages[number].bytes
        self.most = max(self.most, self.alive)
        self.record.made.append(Made(self._line(), (), ""))
        return number

    def label(self, tensor: Tensor | None, component: StorageKind) -> None:
        """Label a tensor, from wherever this is called."""
        with torch._C.DisableTorchFunction():
            super().label(tensor, component)

    def _release(self, number: int) -> None:
        self.alive -= self._storages[number].bytes
        super()._release(number)

    def _put_in_place(self, made: Any) -> None:
        super()._put_in_place(made)
        self.alive -= self._storages[made.first].bytes

    def _follow_new(self, tensor: Tensor, operation: object) -> bool:
        new = super()._follow_new(tensor, operation)
        if new:
            made = self.record.made
            made[-1] = made[-1]._replace(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        return new

    # -- what is run -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        with torch._C.DisableTorchFunction():
            if not func.has_kernel_for_dispatch_key(COMPOSITE):
                return super().__torch_dispatch__(func, types, args, kwargs)
            TorchDispatchMode.__enter__(self)  # torch hands such an operation over whole for tensors of inference mode
            try:
                return func.decompose(*args, **kwargs or {})
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)

    def run(self, func: Op, args: Args, kwargs: Kwargs) -> Any:
        """Execute one operation as StandIn does. Large floating tensors of the host get no numbers."""
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            return None
        tensors = tensors_in(*args, *kwargs.values())
        if not any(x.is_meta for x in tensors) and kwargs.get("device", None) != META:
            return self._on_host(func, args, kwargs, tensors)
        if id(func) not in self._launched:
            self._launched.add(id(func))
            if (uncounted := kernels.uncounted(func)) is not None:
                self.assume(f"{uncounted} is not counted")
        try:
            return super().run(func, args, kwargs)
        except RuntimeError as error:
            if func.namespace in kernels.FOLLOWED and not _lacks_data(error):
                raise
            self.refuse(f"{func} has no known size or result without real numbers")

    def assume(self, what: str) -> None:
        """Note what is taken for true here, with the line that relies on it."""
        self.record.assumed[f"{self._line()}: {what}"] += 1

    def note_later(self, what: str) -> None:
        """Note what the program is set to do after the steps that are followed."""
        if what not in self.record.later:
            self.record.later.append(what)

    def _on_host(self, func: Op, args: Args, kwargs: Kwargs, tensors: list[Tensor]) -> Any:
        """Execute an operation on the host; one with large floating tensors for its shapes alone."""
        if not tensors:
            return _made_on_host(func, args, kwargs)
        if func.is_view or not any(x.numel() > HOST and x.is_floating_point() for x in tensors):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0] if args else None
        shadows: dict[int, Tensor] = {}

        def shadow(x: Any) -> Any:
            if isinstance(x, Tensor):
                if id(x) not in shadows:
                    shadows[id(x)] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                return shadows[id(x)]
            return type(x)(map(shadow, x)) if type(x) in (list, tuple) else x

        def real(x: Any) -> Any:
            if isinstance(x, Tensor):
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
            return type(x)(map(real, x)) if type(x) in (list, tuple) else x

        return real(func(*map(shadow, args), **{key: shadow(value) for key, value in kwargs.items()}))

    def unknown(self, x: Tensor) -> Any:
        """Return 1 for a number that is not known, and note it. A truth that is not known is refused."""
        if x.dtype == torch.bool:
            self.refuse("the program branches on a value that only real numbers decide")
        self.assume("a number that is not known is read as 1")
        return super().unknown(x)

    def refuse(self, reason: str, line: str | None = None) -> NoReturn:
        """End the run, with the line that asks for what cannot be followed."""
        self.record.refused = f"{line or self._line()}: {reason}"
        self.end("refused")

    def fail(self, error: str) -> NoReturn:
        """End the run by an error of the program."""
        self.record.failed = error
        self.end("failed")

    def crash(self, error: str) -> NoReturn:
        """End the run by a fault of this package."""
        self.record.crashed = error
        self.end("crashed")

    def end(self, reason: str) -> NoReturn:
        """End the run, and hand on what was recorded."""
        record = self.record
        with torch._C.DisableTorchFunction():
            self._holders.label_tensors(self.label)
        record.ended = reason
        record.versions = _versions()
        if self._batches:
            record.seen, record.unread = self._batches.seen, self._batches.unread()
        # On the card, layers that a shortened model leaves out would stay: they count as never made.
        gone = {e.storage for e in self._events if e.bytes < 0 and e.storage in self._left_out}
        self._events = [e for e in self._events if e.storage is None or e.storage not in gone]
        record.events, record.components, record.peaks = (
            releases_in_order(self.events()),
            self.components(),
            self.peaks(),
        )
        self._keep(record)

    # -- phases ----------------------------------------------------------------------------------------------------

    def _begin(self, name: str) -> None:
        """Enter a phase of the step that runs."""
        phase = (f"step {self.record.steps + 1}", name) if name else ()
        if phase != self._phase:
            self._entered = list(phase)
            self._change_phase()

    def _enter_block(self, name: str) -> None:
        """Ignore the program's own blocks."""

    def _leave_block(self) -> None:
        """Ignore the program's own blocks."""

    def _before_module(self, module: nn.Module, _: object) -> None:
        if isinstance(module, nn.RNNBase) and on_stand_in(next(module.parameters())):
            self.assume("a recurrent layer runs in plain steps; cuDNN's workspace is not counted")
        if self._within == 0 and not self._in_backward:
            if self._probing:
                self._probing, self.record.stack = False, self._stacks.worth()
                if self.record.stack:
                    self.end("probed")
            self._begin("forward" if torch.is_grad_enabled() else "without gradients")
            self.mark(PASS)  # two depths are aligned call by call: the cost grows with the square of a stretch
        self._within += 1

    def _after_module(self, *_: object) -> None:
        self._within = max(0, self._within - 1)

    def _before_step(self, *_: object) -> None:
        self._begin("optimizer")

    def _after_step(self, *_: object) -> None:
        self.record.steps += 1
        if self.record.steps >= self._most_steps:
            if self._batches and not self._batches.seen and self._reads_on(self._batches):
                self._most_steps += STEPS
            else:
                self.end(f"{self.record.steps} optimizer steps")

    def _reads_on(self, batches: Batches) -> bool:
        """Read further batches on the host. Return whether there is a larger one."""
        try:
            with self.paused():
                return batches.read_on()
        except NotPredicted as error:
            self.refuse(str(error))

    # -- patches ---------------------------------------------------------------------------------------------------

    def _of_program(self, card: Card) -> Iterator[Any]:
        from unittest import mock

        yield from cuda.patches(self, card)
        yield from self._batches.patches(self._line) if self._batches else ()
        patch = mock.patch.object
        yield from self._stacks.patches()
        if self.record.stack is not None:
            for made in (torch.optim.Optimizer, _BaseDataLoaderIter):
                yield patch(made, "__init__", _with_equal_numbers(made.__init__))
        yield patch(nn.Embedding, "__init__", self._noting_vocabulary(nn.Embedding.__init__))
        yield patch(torch.autograd, "backward", self._in_backward_of(torch.autograd.backward))
        yield patch(nn.Module, "load_state_dict", self._loading_weights(nn.Module.load_state_dict))
        yield patch(torch, "load", _mapped(torch.load))
        yield patch(torch, "compile", self._compiled)
        yield patch(subprocess.Popen, "__init__", _launching(subprocess.Popen.__init__))
        yield patch(LazyModuleMixin, "__init__", self._refusing("a lazy module, whose weights have no shape,"))
        for symbol, what in REFUSED:
            yield Replaced(symbol, functools.partial(self._refused, what))
        yield foreign.guarded(self)
        # handles, which remove their hooks
        yield modules.register_module_forward_pre_hook(self._before_module)
        yield modules.register_module_forward_hook(self._after_module, always_call=True)
        yield optimizers.register_optimizer_step_pre_hook(self._before_step)
        yield optimizers.register_optimizer_step_post_hook(self._after_step)
        # as on a card, a parameter stays the same one
        yield patch(torch.__future__, "_swap_module_params_on_conversion", True)

    def _in_backward_of(self, backward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._backwards and not self._holders.optimizers:
                self._after_step()  # of a program that changes its weights by hand
            self._backwards += 1
            self._begin("backward")
            self._in_backward = True
            try:
                return backward(*args, **kwargs)
            finally:
                self._in_backward = False
                self._begin("between")

        return run

    def _compiled(self, model: Any = None, **options: Any) -> Any:
        """Stand in for torch.compile: what is compiled runs eagerly. CUDA graphs, which hold memory, are refused."""
        graphs = [options.get("mode")] * (options.get("mode") in GRAPHS) or [
            *GRAPHS & {*(options.get("options") or {})}
        ]
        if graphs:
            self.refuse(f"torch.compile with {graphs[0]} captures CUDA graphs, which are not followed")
        if model is None:
            return lambda function: self._compiled(function, **options)
        if isinstance(model, nn.Module):
            self.assume(EAGER)
            return model

        @functools.wraps(model)
        def eager(*args: Any, **kwargs: Any) -> Any:
            self.assume(EAGER)  # where it is called: libraries decorate functions that a program never calls
            return model(*args, **kwargs)

        return eager

    def _refused(self, what: str, _: object) -> Any:
        return self._refusing(what)

    def _refusing(self, what: str) -> Any:
        def refused(*_: object, **__: object) -> Any:
            self.refuse(f"{what} is not followed")

        return refused

    def _leave_out(self, layers: Sequence[nn.Module]) -> None:
        """Note what these layers hold on the card."""
        tensors = [x for layer in layers for x in (*layer.parameters(), *layer.buffers())]
        with torch._C.DisableTorchFunction():
            self._left_out |= {number for x in tensors if (number := self.storage_of(x)) is not None}

    def _loading_weights(self, load: Any) -> Any:
        """Return a load_state_dict that checks shapes and no names: a file may lack weights, and a model layers."""

        def load_state_dict(owner: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            found = load(owner, state_dict, strict=False, assign=assign)
            if found.missing_keys and strict:
                self.assume(f"{len(found.missing_keys)} weights that the file lacks are loaded like the others")
            return type(found)([], [])

        return load_state_dict

    def _noting_vocabulary(self, make: Any) -> Any:
        def init(owner: Any, num_embeddings: int, *args: Any, **kwargs: Any) -> None:
            # The table with most rows is the vocabulary's; those of positions have as many rows as a layer is wide.
            if num_embeddings >= max([LEAST_VOCABULARY, *self._logit_widths]):
                self._logit_widths = {num_embeddings}
            make(owner, num_embeddings, *args, **kwargs)

        return init

    # -- lines -----------------------------------------------------------------------------------------------------

    def _line(self) -> str:
        """Return the line of the program or of a library that asks for what happens now."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            known = self._known_lines.get(file)
            if known is None:
                skipped = (OURS, TORCH, PLAIN_PYTHON)
                known = (
                    not file.startswith("<")
                    and ("site-packages" in file.removeprefix(TORCH) or not file.startswith(skipped))
                    and not file.startswith((OURS, TORCH))
                )
                self._known_lines[file] = known
            if known:
                return f"{_short(file)}:{frame.f_lineno}"
            frame = frame.f_back
        return "?"


def _launching(make: Any) -> Any:
    """Return a constructor of processes that ends a launcher where it would start a Python program."""

    def init(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        words = [os.fspath(word) for word in args] if isinstance(args, (list, tuple)) else []
        program = [word for word in words[1:] if word not in ("-u", "-B", "-I")]
        if words[:1] == [sys.executable] and program and (program[0] == "-m" or program[0].endswith(".py")):
            raise _Launched(program, options.get("env"))
        make(self, args, *rest, **options)

    return init


def _with_equal_numbers(make: Any) -> Any:
    """Return a constructor that sets torch's generator, so that both depths read rows in the same order.

    Fewer layers draw fewer random numbers for their weights, which come before an optimizer and a loader's iterator.
    """

    def init(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        torch.default_generator.manual_seed(0)

    return init


def _mapped(load: Any) -> Any:
    """Return a torch.load that leaves weights in their file where it can, and on the card without numbers."""

    def loaded(file: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(map_location, (str, torch.device)) and torch.device(map_location).type == "cuda":
            map_location = META
        if isinstance(file, (str, os.PathLike)) and not options.get("mmap"):
            with contextlib.suppress(RuntimeError):  # files of an older form
                return load(file, map_location, *args, **{**options, "mmap": True})
        return load(file, map_location, *args, **options)

    return loaded


def _made_on_host(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """Return what a factory makes on the host; a large floating tensor without its numbers."""
    size = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    kind = kwargs.get("dtype") or torch.get_default_dtype()
    if math.prod(n for n in size if isinstance(n, int)) <= HOST or not kind.is_floating_point:
        return func(*args, **kwargs)
    return torch.empty(size, dtype=kind)


def _versions() -> dict[str, str]:
    """Return the versions of the libraries that decide about memory, where the program has imported them."""
    found = {}
    for name in FOLLOWED_LIBRARIES:
        if name in sys.modules:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
    return found


def _short(file: str) -> str:
    """Return a file's path from its package on, or from the current folder."""
    _, found, rest = file.rpartition("site-packages" + os.sep)
    return rest if found else os.path.relpath(file) if file.startswith(os.getcwd()) else file


def follow(command: Sequence[str], module: bool, run: Followed) -> NoReturn:
    """Run a program to the end of `run`, or its own.

    `command` is a file, a console script or (`module`) a module with its arguments. An error of the program is printed
    with the program's lines alone.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("WANDB_MODE", "disabled")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # weights are moved by this thread, which is followed
    gc.disable()  # what Python's collector frees, and when, would differ between depths
    with run:
        to_the_end(run, functools.partial(_start_all, list(command), module))


def to_the_end(run: Followed, start: Callable[[], None]) -> NoReturn:
    """Start a program and end `run` with it, or with its error, which is printed."""
    try:
        start()
    except SystemExit as end:
        if end.code not in (None, 0):
            run.fail(f"it exited with {end.code}")
    except Exception as error:  # a program's own, of any kind
        told = _own_lines(error)
        first = str(error).partition("\n")[0]
        frames = [x for x in told.stack if not x.filename.startswith(TORCH)] or told.stack
        place = f"{_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"  # none in an error of syntax
        if _lacks_data(error) or ASKS_DRIVER.search(first):
            why = first if _lacks_data(error) else f"it asks CUDA itself, which is not stood in for ({first})"
            run.refuse(why, place)
        if _is_ours(error):
            traceback.print_exception(error)
            run.crash(f"{type(error).__name__}: {first}, asked for at {place}")
        print("".join(told.format()), end="", file=sys.stderr, flush=True)
        run.fail(f"{type(error).__name__}: {first}")
    run.end("its end")


def _lacks_data(error: Exception) -> bool:
    """Return whether torch says that something cannot be done with tensors without data."""
    return isinstance(error, NotImplementedError) or re.search(r"\bmeta\b|\bfake impl", str(error)) is not None


def _is_ours(error: BaseException) -> bool:
    """Return whether a line of this package raised an error, and not an operation that it hands on."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(OURS) and "func(*" not in (frames[-1].line or "")


def _own_lines(error: BaseException) -> traceback.TracebackException:
    """Return an error's traceback without the lines of this package, and of torch and Python that call it."""
    told = traceback.TracebackException.from_exception(error)
    waiting = [told]
    while waiting:
        one = waiting.pop()
        hidden = (OURS, "<frozen", TORCH + "overrides.py")
        one.stack = traceback.StackSummary.from_list([x for x in one.stack if not x.filename.startswith(hidden)])
        waiting += [x for x in (one.__cause__, one.__context__) if x is not None]
    return told


def _start_all(command: list[str], module: bool) -> None:
    """Run a program, and in the place of a launcher what it launches."""
    while True:
        sys.argv = list(command)
        try:
            _start(command[0], module)
        except _Launched as launched:
            command, module = launched.command, launched.command[0] == "-m"
            command = command[module:]
            os.environ.update(launched.environment or {})
        else:
            return


def _start(program: str, module: bool) -> None:
    if module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif Path(program).is_file():
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")
    else:
        (entry,) = importlib.metadata.entry_points(group="console_scripts", name=program)
        sys.exit(entry.load()())
