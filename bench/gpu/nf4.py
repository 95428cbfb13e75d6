"""4-bit weights: ways to compute products of few rows, and paged optimizer states."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from bench.gpu.item import Context
from bench.gpu.measured import OptimizerTime, PagedFigures, ProductFigures
from bench.gpu.record import Decision
from bench.gpu.variants import VariantUnavailable, synchronize

ROWS = (1, 4, 5, 8, 10, 16, 20, 32, 64)
RING = 256_000_000  # bytes of packed weights that are used in turn: more than any card's second-level cache
AS_FAST = 1.1  # the dispatched choice may take this much of the fastest one's time
REPEATS = 5
REPLAYS = 10  # of a ring between two synchronizations, whose time is then little beside the products'


class Rings(NamedTuple):
    """Weights of one shape that are used in turn, so that each has left the cache when it comes again."""

    packed: list[tuple[torch.Tensor, Any]]  # with bitsandbytes' state of the quantization
    dense: list[torch.Tensor]


def products(context: Context[ProductFigures]) -> Decision:
    """Measure microseconds of each linear layer's product by rows and choice, with weights outside of the cache."""
    import bitsandbytes

    architecture = context.recipe.recipe.model.architecture
    assert architecture
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    keys = hidden // architecture.num_attention_heads * architecture.num_key_value_heads
    shapes = {"query, output": (hidden, hidden), "key, value": (keys, hidden), "gate, up": (inner, hidden)}
    shapes |= {"down": (hidden, inner)}
    table = context.measured
    half = torch.bfloat16
    seen = set()
    for name, (out, width) in shapes.items():
        if (out, width) in seen:
            continue  # keys are as wide as queries
        seen.add((out, width))
        count = 2 if context.dry_run else max(4, RING // (out * width // 2))
        dense = torch.randn(out, width, dtype=half, device=context.device)
        packed = [
            bitsandbytes.functional.quantize_4bit(dense, compress_statistics=True, quant_type="nf4")
            for _ in range(count)
        ]
        # bfloat16 weights are four times as large: a ring of a quarter as many has the same bytes
        rings = Rings(packed, [dense.clone() for _ in range(max(2, count // 4))])
        for rows in ROWS[:2] if context.dry_run else ROWS:
            x = torch.randn(rows, width, dtype=half, device=context.device)
            table[f"{name} {out}x{width}, {rows} rows"] = {
                choice: _microseconds(choice, x, rings) for choice in CHOICES if _applies(choice, rows)
            }
            context.save()
        del rings, packed, dense
    return products_decision(context.measured, context.dry_run)


@contextmanager
def force_dispatch(fused: bool) -> Iterator[None]:
    """Make bitsandbytes use its fused kernel, or unpack the weight, against its own rule."""
    if not torch.cuda.is_available():
        raise VariantUnavailable("needs CUDA")
    from bitsandbytes.backends.cuda import ops

    name = "_gemm_4bit_use_custom_fn"
    if not hasattr(ops, name):
        raise VariantUnavailable(f"this bitsandbytes has no {name}")
    original = getattr(ops, name)
    setattr(ops, name, lambda *_: fused)
    try:
        yield
    finally:
        setattr(ops, name, original)


# name -> (rows that go together or None for all, how bitsandbytes is made to choose)
CHOICES: dict[str, tuple[int | None, Callable[[], Any]]] = {
    "as dispatched": (None, nullcontext),
    "fused": (None, lambda: force_dispatch(True)),
    "unpacked": (None, lambda: force_dispatch(False)),
    "fused in groups of 8": (8, lambda: force_dispatch(True)),
    "fused in groups of 5": (5, lambda: force_dispatch(True)),
    "bfloat16 weight": (None, nullcontext),
}


def _applies(choice: str, rows: int) -> bool:
    group = CHOICES[choice][0]
    return group is None or rows > group


def _microseconds(choice: str, x: torch.Tensor, rings: Rings) -> float | str:
    """Return the median microseconds of a product, over a whole ring of weights; an error as text."""
    import bitsandbytes

    group, switch = CHOICES[choice]
    parts = x.split(group) if group else (x,)

    def packed() -> None:
        for weight, state in rings.packed:
            results = [bitsandbytes.matmul_4bit(part, weight, quant_state=state) for part in parts]
            if group:
                torch.cat(results)

    def dense() -> None:
        for weight in rings.dense:
            F.linear(x, weight)

    work, count = (dense, len(rings.dense)) if choice == "bfloat16 weight" else (packed, len(rings.packed))
    try:
        with switch(), torch.no_grad():
            replay = _captured(work, x.device)
            seconds = []
            for _ in range(REPEATS):
                synchronize()
                start = time.perf_counter()
                for _ in range(REPLAYS):
                    replay()
                synchronize()
                seconds.append(time.perf_counter() - start)
    except (VariantUnavailable, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return 1e6 * statistics.median(seconds) / (REPLAYS * count)


def _captured(work: Callable[[], None], device: torch.device) -> Callable[[], object]:
    """Return what does the work again: the replay of its CUDA graph, as decoding steps run; on a CPU the work itself.

    Python takes longer to call a small product than a GPU to compute it, so that its own calls would time Python.
    """
    work()  # loads kernels, and makes the workspaces that a capture must find
    if device.type != "cuda":
        return work
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


def products_decision(measured: ProductFigures, dry_run: bool) -> Decision:
    """Return whether the dispatched choice is nearly the fastest for every product; a dry run decides nothing."""
    slower: dict[str, float] = {}
    for name, row in measured.items():
        choices = {choice: us for choice, us in row.items() if isinstance(us, float) and choice != "bfloat16 weight"}
        if "as dispatched" not in choices:
            return Decision(False, f"{name}: {row['as dispatched']}")
        if len(choices) > 1:
            slower[name] = choices["as dispatched"] / min(choices.values())
    if not slower:
        return Decision(None, "no other kernel ran that the dispatched ones could be compared with")
    worst = max(slower, key=slower.__getitem__)
    count = sum(ratio > AS_FAST for ratio in slower.values())
    why = f"{count} of {len(slower)} products could be faster; {worst}: by a factor of {slower[worst]:.2f}"
    return Decision(None if dry_run else slower[worst] <= AS_FAST, why)


def paged(context: Context[PagedFigures]) -> Decision:
    """Run ten steps of 8-bit AdamW with paged and unpaged states, on LoRA weights of the recipe's shape."""
    import bitsandbytes
    from bitsandbytes.functional import GlobalPageManager

    recipe = context.recipe.recipe
    assert recipe.model.architecture
    hidden, inner = recipe.model.architecture.hidden_size, recipe.model.architecture.intermediate_size
    layer = [(recipe.lora.r, hidden), (hidden, recipe.lora.r), (recipe.lora.r, inner), (inner, recipe.lora.r)]
    shapes = list(itertools.chain.from_iterable([layer] * recipe.model.architecture.num_hidden_layers))
    measured = context.measured
    plain, measured["unpaged"] = _updates(bitsandbytes.optim.AdamW8bit, shapes, context.device)
    context.save()
    weights, measured["paged"] = _updates(bitsandbytes.optim.PagedAdamW8bit, shapes, context.device)
    context.save()
    pages = GlobalPageManager.get_instance().paged_tensors
    measured["paged_bytes"] = sum(page.numel() * page.element_size() for page in pages)
    measured["same_weights"] = all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True))
    return paged_decision(measured)


def paged_decision(measured: PagedFigures) -> Decision:
    """Return whether states were paged and the weights are those of the unpaged optimizer."""
    same = measured["same_weights"]
    ratio = measured["paged"]["step_seconds"] / measured["unpaged"]["step_seconds"]
    why = f"{measured['paged_bytes'] / 1e6:.0f} MB paged, same weights: {same}, {ratio:.2f} times the time"
    return Decision(bool(measured["paged_bytes"]) and same, why)


def _updates(
    kind: Any, shapes: list[tuple[int, int]], device: torch.device, steps: int = 10
) -> tuple[list[torch.Tensor], OptimizerTime]:
    """Return the weights after some steps with random gradients, a step's seconds and the bytes of allocated states."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    gradients = [torch.empty_like(parameter) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    before = torch.cuda.memory_allocated()
    optimizer = kind(parameters, lr=1e-3)
    seconds = []
    for _ in range(steps):
        for gradient in gradients:
            gradient.normal_()
        synchronize()
        start = time.perf_counter()
        optimizer.step()
        synchronize()
        seconds.append(time.perf_counter() - start)
    state_bytes = torch.cuda.memory_allocated() - before
    return [p.detach() for p in parameters], {
        "step_seconds": statistics.median(seconds),
        "state_bytes_allocated": state_bytes,
    }
