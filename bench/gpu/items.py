"""What the items of the GPU benchmark measure. Seconds are the wall's.

A function gets a `Measurement`, fills `measured` key by key and saves after each, so that an item that is cut off loses
only what it was measuring. A variant that fails has its error as text in place of its figures.
"""

import platform
import statistics
import subprocess
import sys
import time
import traceback
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import options, records
from bench import steps as stage_steps
from bench.ceilings import ceilings
from bench.gpu import packages
from bench.memory import beside, pinned_peaks, unmatched
from bench.steps import spread
from rlhf import recipe as recipes
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.models.adapters import new_adapter, save_adapter
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.models.precision import mixed_precision
from rlhf.models.shared_base import SharedBase
from rlhf.plan import padding
from rlhf.process.children import child_environment
from rlhf.process.libraries import quiet_libraries
from rlhf.process.torch_setup import set_up_torch
from rlhf.recipe import Changes, PinnedRecipe
from rlhf.recipe.rehearsal import random_weights_changes
from rlhf.recipe.schema import Sft
from rlhf.recipe.schema_online import Ppo
from rlhf.recipe.stages import Role
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from rlhf.run.directory import StageRun

if TYPE_CHECKING:
    from bench.gpu.__main__ import Item

T = TypeVar("T")
ROLES: tuple[Role, ...] = ("policy", "reference", "reward", "value")
STEPS = 4  # of a stage, after the warm-up
# With the warm-up a window of sorted rows: its batches have rows of similar length each, short to long.
SUPERVISED_STEPS = padding.SORTED_BATCHES - stage_steps.WARM_UP
ROUNDS, REPEATS, SWITCHES = 3, 2, 5
FEW_TOKENS = 8  # of a row on which the GPU is never behind its host
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "numpy")
# A dry run takes the CPU recipe with a model and batches so small that only the code is tried.
TINY: Changes = {
    "model.architecture.hidden_size": 32,
    "model.architecture.intermediate_size": 64,
    "model.architecture.num_hidden_layers": 2,
    "tokenizer.vocab_size": 261,  # the smallest that can be trained
    "lora.r": 4,
    "ppo.batch_size": 4,
    "ppo.rollout_batch_size": 4,
    "ppo.per_device_train_batch_size": 2,
    "ppo.max_prompt_length": 12,
    "ppo.response_length": 12,
    "evaluate.max_prompt_length": 12,
    "evaluate.response_length": 12,
    "evaluate.batch_size": 4,
    **{f"{stage}.max_length": 24 for stage in ("sft", "rm", "dpo")},
    **{f"{stage}.max_prompt_length": 12 for stage in ("sft", "rm", "dpo")},
    **{f"{stage}.per_device_train_batch_size": 2 for stage in ("sft", "rm", "dpo")},
}


class Measurement:
    """An item's recipe, device, scratch folder and record; `save` puts what has been measured so far on disk."""

    def __init__(self, item: "Item", out: Path, dry_run: bool, scratch: Path):
        self.dry_run, self.scratch, self._out = dry_run, scratch, out
        self.device = torch.device("cpu" if dry_run else "cuda")
        self._loaded = None
        if item.hw:
            tiny = (records.RECIPES / "cpu-tiny/v1", TINY)
            self._loaded = recipes.load(*tiny) if dry_run else options.load(item.hw, item.guide, None, ())
        self.record = records.new("gpu", self._loaded, self.device)
        found = {name: version for name in PACKAGES if (version := packages.installed_version(name))}
        self.record |= {"gpu_item": item.name, "outcome": "started", "error": None, "dry_run": dry_run}
        self.record |= {"packages": found, "python": platform.python_version(), "measured": {}}
        self.measured: dict[str, Any] = self.record["measured"]
        self.save()

    @property
    def loaded(self) -> PinnedRecipe:
        """Return the item's unchanged recipe, or the tiny one in a dry run."""
        assert self._loaded, "this item has no recipe"
        return self._loaded

    def save(self) -> None:
        """Replace the record on disk."""
        records.save(self.record, self._out / "results" / records.place(self.record))


def run(item: "Item", out: Path, dry_run: bool) -> None:
    """Run an item and write its record; exit with 1 where it fails."""
    with TemporaryDirectory(prefix="rlhf-gpu-") as scratch, quiet_libraries():
        one = Measurement(item, out, dry_run, Path(scratch))
        if item.hw:
            set_up_torch(one.loaded.recipe)  # attention kernels, seed and memory cap, as in a run
        idle, start = used_bytes(), time.monotonic()
        try:
            globals()[item.function](one, **item.options)
            one.record["outcome"] = "done"
        except Exception as error:
            traceback.print_exc()
            one.record |= {
                "outcome": "failed",
                "error": f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}",
            }
        used = used_bytes()
        # In use on the card before torch came, and beside its allocator now; the difference is the process's context.
        beside_bytes = None if used is None else used - torch.cuda.memory_reserved()
        one.record |= {"idle_bytes": idle, "beside_bytes": beside_bytes, "seconds": time.monotonic() - start}
        one.save()
    if one.record["outcome"] != "done":
        sys.exit(1)


def smi(query: str) -> str | None:
    """Return what nvidia-smi says, a line for each card; None where it cannot be run. It takes none of the memory."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def used_bytes() -> int | None:
    """Return the memory in use on the only card, by all processes and the driver; None if not known, or of several."""
    said = smi("memory.used") or ""
    return int(said) * 2**20 if said.isdigit() else None


def device(one: Measurement) -> None:
    """Record the card, its driver and settings, missing packages, and the rates of a large product and a large copy."""
    one.measured |= {"other_packages": packages.report(), "without": packages.optional()}
    if one.device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        one.measured |= {
            "capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "cudnn": torch.backends.cudnn.version(),
            "smi": smi("driver_version,clocks.sm,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current"),
        }
        one.save()
    one.measured["ceilings"] = ceilings(one.device, torch.bfloat16)


def peaks(one: Measurement) -> None:
    """Measure two steps of each stage on the longest rows: peaks by phase, in bytes, beside those of predicted.json."""
    from bench.peaks import measuring

    loaded = one.loaded
    pinned = not one.dry_run and (loaded.directory / "predicted.json").exists()
    one.measured |= {"phases": [], "unmatched": [], "out_of_memory": []}
    with measuring(loaded) as measure_stage:
        for stage in ("sft", "rm") if one.dry_run else ("sft", "rm", "ppo", "dpo"):
            try:
                found = measure_stage(stage)
            except torch.OutOfMemoryError as error:  # a result; the others still run
                one.measured["out_of_memory"].append({"stage": stage, "error": str(error)[:500]})
                continue
            allocated = {phase: peak["bytes"] for phase, peak in found.items()}
            predicted = pinned_peaks(loaded, stage) if pinned else {}
            errors = {row["phase"]: row for row in beside(stage, predicted, allocated)}
            one.measured["unmatched"] += unmatched(stage, predicted, allocated) if pinned else []
            one.measured["phases"] += [
                {
                    "stage": stage,
                    "phase": phase,
                    "measured_bytes": peak["bytes"],
                    "reserved_bytes": peak.get("reserved"),
                }
                | errors.get(phase, {})
                for phase, peak in found.items()
            ]
            one.save()


def tests(one: Measurement, choose: str) -> None:
    """Run the tests of tests/gpu that pytest's `-k` chooses. Raises RuntimeError where one fails."""
    report = one.scratch / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/gpu", "-k", choose]
    subprocess.run([*command, f"--junitxml={report}"], cwd=records.ROOT, env=child_environment())
    cases = {f"{case.get('classname')}::{case.get('name')}": case for case in xml.parse(report).iter("testcase")}
    ended = ("skipped", "failure", "error")
    outcomes = {name: next((part.tag for part in case if part.tag in ended), "passed") for name, case in cases.items()}
    one.measured["tests"] = outcomes
    failed = [name for name, outcome in outcomes.items() if outcome in ("failure", "error")]
    one.measured["messages"] = {name: " ".join((cases[name][0].get("message") or "").split())[:500] for name in failed}
    if failed:
        raise RuntimeError(f"{len(failed)} tests fail: {failed[0]}")


def steps(one: Measurement, stages: list[Any]) -> None:
    """Measure seconds, tokens and peaks of real steps of the stages, on rows as long as HH-RLHF's."""
    one.measured |= {"shape": "hh", "stages": {}}
    one.measured["ceilings"] = ceilings(one.device, getattr(torch, one.loaded.recipe.model.dtype))
    chosen = stages[:1] if one.dry_run else stages
    for stage in chosen:
        one.measured["stages"] |= stage_steps.measure(
            one.loaded,
            (stage,),
            one.scratch / "runs",
            steps=2 if one.dry_run else STEPS,
            supervised_steps=2 if one.dry_run else SUPERVISED_STEPS,
            measured=chosen,
            shape="hh",
            preflight=False,
        )
        one.save()


def training(one: Measurement) -> None:
    """Time forward and backward pass of the decoder in micro-batches of SFT and PPO, and a switch between roles.

    `host_seconds`: until the host has queued the same passes of a row of FEW_TOKENS; `mfu` by the median.
    """
    shared, _ = shared_base(one)
    recipe = one.loaded.recipe
    sft, ppo = recipe.options(Sft), recipe.options(Ppo)
    sizes = {
        "sft": (sft.per_device_train_batch_size, sft.max_length),
        "ppo": (ppo.per_device_train_batch_size, ppo.max_prompt_length + ppo.response_length),
    }
    best = ceilings(one.device, torch.bfloat16)["flops"]
    one.measured |= {"flops": best, "switch_ms": _switch_ms(shared), "micro_batches": {}}
    for stage, (rows, length) in sizes.items():
        whole, few = (torch.randint(3, 40, size, device=one.device) for size in ((rows, length), (1, FEW_TOKENS)))
        shared.base.train()
        with FlopCounterMode(display=False) as counter:
            _forward(shared, whole).backward()  # the warm-up, and what is counted
        if one.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = [_seconds(_both(shared, whole)) for _ in range(ROUNDS * REPEATS)]
        host = [_seconds(_both(shared, few)) for _ in range(ROUNDS * REPEATS)]
        peak = torch.cuda.max_memory_allocated() if one.device.type == "cuda" else None
        shared.base.eval()
        scoring = [_seconds(partial(_forward_alone, shared, whole)) for _ in range(ROUNDS * REPEATS)]
        shared.base.zero_grad(set_to_none=True)
        operations = counter.get_total_flops()
        one.measured["micro_batches"][stage] = {
            "rows": rows,
            "length": length,
            "seconds": spread(seconds),
            "host_seconds": spread(host),
            "scoring_seconds": spread(scoring),
            "operations": operations,
            "peak_bytes": peak,
            "mfu": operations / statistics.median(seconds) / best,
        }
        one.save()


def _forward(shared: SharedBase, ids: torch.Tensor) -> torch.Tensor:
    """Return the sum of the decoder's output for tokens of shape (rows, length), as a loss."""
    with mixed_precision(shared.base):
        hidden: torch.Tensor = shared.base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.float().sum()


def _both(shared: SharedBase, ids: torch.Tensor) -> Callable[[], None]:
    return lambda: _forward(shared, ids).backward()


def _forward_alone(shared: SharedBase, ids: torch.Tensor) -> None:
    with torch.no_grad():
        _forward(shared, ids)


def _seconds(work: Callable[[], object]) -> float:
    """Return the seconds until the device is done with some work."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def _switch_ms(shared: SharedBase) -> float:
    """Return the median milliseconds of a role switch between policy and value, as in PPO's micro-batches."""
    seconds = []
    for _ in range(SWITCHES):
        for role in ("value", "policy"):
            start = time.perf_counter()
            shared.roles.activate(role)
            seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def decoding(one: Measurement, rows: list[int]) -> None:
    """Time rollouts by number of rows: as the stages sample, by the library's layers, and without adapters.

    A step is the mean over a rollout's steps but the first, which the prefill makes. `bytes_read` is what a step must
    read: weights, the active adapter, keys and values; `mbu` its share of a large copy's rate.
    """
    shared, tokenizer = shared_base(one)
    ppo = one.loaded.recipe.options(Ppo)
    bandwidth = ceilings(one.device, torch.bfloat16)["bandwidth"]
    one.measured |= {"bandwidth": bandwidth, "prompt": ppo.max_prompt_length, "response": ppo.response_length}
    one.measured["rows"] = {}
    for count in [4] if one.dry_run else rows:
        sampling = Sampling(ppo.max_prompt_length, ppo.response_length, 1.0, count)
        table: dict[str, Any] = {}
        one.measured["rows"][str(count)] = {"variants": table}
        for name, variant in VARIANTS.items():
            read = bytes_per_step(shared, sampling, adapter=variant is not no_adapters)
            try:
                runs = [rollout(shared, tokenizer, sampling, variant, seed) for seed in range(ROUNDS + 1)]
            except Exception as error:  # of one variant: a result, and the others still run
                table[name] = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            first, *counted = ({phase: s / (ppo.response_length - 1) for phase, s in run.items()} for run in runs)
            step = spread([run["decode"] for run in counted])
            table[name] = {
                "first_step_seconds": first["decode"],  # captures included
                "step_seconds": step,
                "prefill_seconds": spread([run["prefill"] for run in runs[1:]]),
                "outside_seconds": spread([run["rollout"] - run["prefill"] - run["decode"] for run in runs[1:]]),
                "bytes_read": read,
                "mbu": read / step["median"] / bandwidth,
            }
            one.save()


@contextmanager
def no_adapters(shared: SharedBase) -> Iterator[None]:
    """Run the base alone, which bounds the cost of adapters."""
    shared.roles.activate("base")
    try:
        yield
    finally:
        shared.roles.activate("policy")


@contextmanager
def library_layers(shared: SharedBase) -> Iterator[None]:
    """Sample with the library's layers where the stages sample with the lean trunk."""
    trunk, shared.lean_trunk = shared.lean_trunk, None
    try:
        yield
    finally:
        shared.lean_trunk = trunk


Variant = Callable[[SharedBase], AbstractContextManager[None]]
VARIANTS: Mapping[str, Variant] = {
    "as the stages run": lambda shared: nullcontext(),
    "the library's layers": library_layers,
    "no adapters": no_adapters,
}


def rollout(
    shared: SharedBase, tokenizer: DialogueTokenizer, sampling: Sampling, variant: Variant, seed: int
) -> dict[str, float]:
    """Return the seconds of one whole rollout, of its prefill and of its decoding, captures included."""
    longest = sampling.max_prompt_length
    lengths = [longest - row % min(7, longest - 1) for row in range(sampling.batch_size)]
    prompts = [[3 + (7 * row + i) % 40 for i in range(length)] for row, length in enumerate(lengths)]
    torch.manual_seed(seed)
    spent: dict[str, float] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        synchronize()
        start = time.perf_counter()
        yield
        synchronize()
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - start

    with variant(shared), phase("rollout"):
        sample(shared.base, prompts, tokenizer, sampling, phase=phase, trunk=shared.role_trunk)
    return spent


def bytes_per_step(shared: SharedBase, sampling: Sampling, adapter: bool) -> int:
    """Return the bytes that a decoding step must read, with half of a response in the cache.

    Embeddings are looked up and do not count, unless they are the output layer, too; norms are left out. A packed
    weight counts as it lies.
    """
    config = shared.base.config
    embeddings, head = shared.base.get_input_embeddings().weight, shared.base.get_output_embeddings().weight
    base = [p for name, p in shared.base.named_parameters() if "lora_" not in name and p.dim() > 1]
    weights = sum(p.numel() * p.element_size() for p in base if p is not embeddings or p is head)
    adapters = sum(p.numel() * p.element_size() for p in shared.roles.parameters("policy")) if adapter else 0
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slots = sampling.max_prompt_length + sampling.response_length / 2
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * size * sampling.batch_size * slots
    return int(weights + adapters + numbers * head.element_size())


def shared_base(one: Measurement) -> tuple[SharedBase, DialogueTokenizer]:
    """Return the recipe's base with random weights and four LoRA adapters, policy and value trainable; its tokenizer.

    All adapters are the same new one, B = 0, which is as fast as any. Files are written below the scratch folder.
    """
    loaded = one.loaded.with_changes(random_weights_changes(one.loaded.recipe, 64, "longest"))
    run = StageRun(one.scratch, loaded, "sft")
    base = load_base(run.base, one.device)
    folder = run.path / "adapter"
    folder.mkdir(parents=True)
    model = new_adapter(base, loaded.recipe.lora)
    save_adapter(model, run.base.model.revision, folder)
    lean = loaded.recipe.hardware.trunk == "lean"
    shared = SharedBase(model.unload(), dict.fromkeys(ROLES, folder), trainable=("policy", "value"), lean=lean)
    shared.roles.activate("policy")
    return shared, load_tokenizer(run.base)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
