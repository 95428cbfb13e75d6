"""Items about the card alone: its facts, the capture of decoding steps, the waste of the allocator."""

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from bench.ceilings import ceilings
from bench.gpu import packages
from bench.gpu.item import Context
from bench.gpu.measured import AllocatorFigures, AllocatorPeaks, DeviceFigures, GraphFigures, TokenAgreement
from bench.gpu.record import Decision
from bench.reading import last_line
from rlhf.memory.predict import FRAGMENTATION
from rlhf.process.children import child_environment

T = TypeVar("T")

OLDEST = (8, 0)  # compute capability with bfloat16 in the matrix units
OLDEST_DRIVER = 580  # torch's wheel is built for CUDA 13.0


def device(context: Context[DeviceFigures]) -> Decision:
    """Record the card, its driver and settings, the packages, and the rates of a large product and a large copy."""
    measured = context.measured
    measured["other_packages"], measured["without"] = packages.report(), packages.optional()
    if context.device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        measured["capability"] = [properties.major, properties.minor]
        measured["multiprocessors"] = properties.multi_processor_count
        measured["l2_bytes"] = getattr(properties, "L2_cache_size", None)
        measured["cudnn"] = torch.backends.cudnn.version()
        measured["cudnn_attention"] = torch.backends.cuda.cudnn_sdp_enabled()
        measured["smi"] = _smi("driver_version,clocks.sm,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current")
    context.save()
    measured["ceilings"] = ceilings(context.device, torch.bfloat16)
    if context.dry_run:
        return Decision(None, "a dry run decides nothing")
    return decision(measured)


def decision(measured: DeviceFigures) -> Decision:
    """Return whether card, driver and packages are those that recipes need; None where only the driver is unknown."""
    capability, differing = tuple(measured["capability"]), len(measured["other_packages"])
    driver = re.match(r"\d+", measured["smi"] or "")
    rates = measured["ceilings"]
    why = f"{rates['flops'] / 1e12:.0f} TFLOP/s, {rates['bandwidth'] / 1e12:.2f} TB/s, {differing} packages differ"
    why += f", compute capability {'.'.join(map(str, capability))}, driver {driver[0] if driver else 'unknown'}"
    if capability < OLDEST or differing or (driver and int(driver[0]) < OLDEST_DRIVER):
        return Decision(False, why)
    return Decision(True if driver else None, why)


def _smi(query: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def graphs(context: Context[GraphFigures]) -> Decision:
    """Capture several graphs one after another, bare and in a rollout; the risky variant comes last."""
    measured = context.measured
    measured["own_pool"] = _attempt(lambda: _captures(shared=False))
    context.save()
    measured["rollout"] = _attempt(_same_tokens)
    context.save()
    measured["shared_pool"] = _attempt(lambda: _captures(shared=True))
    tokens = measured["rollout"]
    same = not isinstance(tokens, str) and all(row["share"] == 1.0 for row in tokens.values())
    return Decision(
        measured["own_pool"] == "works" and same, f"own pool: {measured['own_pool']}; tokens as in plain steps: {same}"
    )


def _attempt(work: Callable[[], T]) -> T | str:
    """Return what `work` returns, or its error as text."""
    try:
        return work()
    except Exception as error:  # a refused capture is a result
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _captures(shared: bool) -> str:
    """Capture, replay and drop a product three times; cuBLAS keeps a workspace from the first capture on."""
    a, b = torch.randn(1024, 1024, device="cuda"), torch.randn(16, 1024, device="cuda")
    pool = torch.cuda.graph_pool_handle() if shared else None
    for _ in range(3):
        _ = b @ a
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            _ = b @ a
        graph.replay()
        torch.cuda.synchronize()
        del graph
    return "works"


def _same_tokens() -> dict[str, TokenAgreement]:
    """Return for each variant the share of tokens that captured steps and plain steps draw alike, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from bench.gpu.variants import AS_IT_IS, DECODING_VARIANTS, VariantUnavailable, in_turn, windows_of_64
    from rlhf.rollout.decoding import Sampling
    from rlhf.rollout.engine import sample

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **shape)).eval()
    model.cuda()
    tokenizer = _Ids()
    prompts = [[3 + (7 * row + i) % 900 for i in range(20 + row % 5)] for row in range(12)]
    sampling = Sampling(max_prompt_length=32, response_length=600, temperature=1.0, batch_size=12)

    def draw() -> torch.Tensor:
        torch.manual_seed(1)
        return sample(model, prompts, tokenizer, sampling).tokens

    measured: dict[str, TokenAgreement] = {}
    with in_turn(DECODING_VARIANTS["plain steps"], model):
        plain = draw()
    for name, variant in ((AS_IT_IS, DECODING_VARIANTS[AS_IT_IS]), ("windows of 64", windows_of_64)):
        try:
            with in_turn(variant, model):
                tokens = draw()
        except VariantUnavailable:
            continue
        share = (plain == tokens).float().mean().item() if plain.shape == tokens.shape else 0.0
        measured[name] = {"share": share}
    return measured


class _Ids:
    """The two ids that a rollout needs of a tokenizer."""

    pad_id, eos_id = 0, 2


def allocator(context: Context[AllocatorFigures]) -> Decision:
    """Measure reserved over allocated bytes after batches of many lengths, with and without expandable segments."""
    measured = context.measured
    measured["expandable"] = _workload_peaks(context.device, "expandable_segments:True")
    context.save()
    measured["fixed"] = _workload_peaks(context.device, "expandable_segments:False")
    context.save()
    return allocator_decision(measured)


def _workload_peaks(device: torch.device, setting: str) -> AllocatorPeaks:
    """Return the peaks of the workload in a process whose allocator has this setting."""
    command = [sys.executable, "-m", "bench.gpu.workload", device.type]
    environment = child_environment(PYTORCH_ALLOC_CONF=setting)
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode:
        raise RuntimeError(f"{setting}: {process.stderr.strip()[-500:]}")
    return last_line(process.stdout, AllocatorPeaks, f"bench.gpu.workload with {setting}")


def allocator_decision(measured: AllocatorFigures) -> Decision:
    """Return whether expandable segments waste no more than predictions assume; None on a CPU."""
    waste = {}
    for name, peaks in (("expandable", measured["expandable"]), ("fixed", measured["fixed"])):
        if peaks["reserved"] is None or peaks["allocated"] is None:
            return Decision(None, "a CPU's allocator reserves nothing")
        waste[name] = peaks["reserved"] / peaks["allocated"] - 1
    why = ", ".join(f"{name}: {share:+.1%}" for name, share in waste.items())
    return Decision(waste["expandable"] <= FRAGMENTATION, why)
