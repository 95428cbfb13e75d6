"""Attention kernel of each shape that the stages use, and the cost of a shape's first call."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from bench.gpu.item import Context, with_random_weights
from bench.gpu.measured import AttentionFigures, KernelTable, KernelTime
from bench.gpu.model import shared_base
from bench.gpu.record import Decision
from bench.gpu.variants import AS_IT_IS, cudnn_attention, synchronize
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.models.precision import mixed_precision
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import PinnedRecipe, Ppo, Recipe, Sft
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample

KERNELS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # torch.nn.attention.SDPBackend
PLAN_MS = 10.0  # more than this beyond a later call is a plan being built
SHORTER = (0, 3, 24)  # tokens less than the longest row: batches by length have hundreds of lengths


class Call(NamedTuple):
    """A call of scaled_dot_product_attention that the code makes, with inputs of its shapes."""

    label: str
    inputs: list[torch.Tensor]  # queries, keys, values
    mask: torch.Tensor | None
    options: dict[str, Any]  # its other keyword arguments


Note = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, dict[str, Any]], None]


def measure(context: Context[AttentionFigures]) -> Decision:
    """Collect the calls of one decoder layer in training, scoring and decoding, then time each by itself."""
    loaded = with_random_weights(context.recipe, {"model.architecture.num_hidden_layers": 1})
    calls = collect(context, loaded)
    cudnn_allowed = torch.backends.cuda.cudnn_sdp_enabled()
    context.measured["cudnn_allowed_as_the_stages_run"] = cudnn_allowed
    tables: dict[str, KernelTable] = {AS_IT_IS: {}, f"cuDNN {'off' if cudnn_allowed else 'allowed'}": {}}
    for (name, table), allowed in zip(tables.items(), (cudnn_allowed, not cudnn_allowed), strict=True):
        context.measured[name] = table
        with cudnn_attention(allowed)(None):
            for call in calls:
                try:
                    table[call.label] = _time(call)
                except RuntimeError as error:  # a kernel that refuses a shape is a result
                    table[call.label] = f"{type(error).__name__}: {str(error)[:200]}"
                context.save()
    return _decision(tables[AS_IT_IS], {call.label: call.mask is not None for call in calls}, context.dry_run)


def collect(context: Context[AttentionFigures], loaded: PinnedRecipe) -> list[Call]:
    """Return the distinct attention calls of the code, with inputs for each. The calls are not computed."""
    shared, tokenizer = shared_base(loaded, context.device, context.scratch)
    calls: dict[tuple[object, ...], Call] = {}

    def note(
        label: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        keywords: dict[str, Any],
    ) -> None:
        key = (label.split(",")[0], q.shape, k.shape, mask is None)
        text = f"{label}, q {tuple(q.shape)}, k {tuple(k.shape)}, {'no mask' if mask is None else 'mask'}"
        inputs = [torch.randn_like(x, requires_grad=label.startswith("training")) for x in (q, k, v)]
        calls.setdefault(key, Call(text, inputs, mask, keywords))

    note_training(loaded.recipe, shared, note)
    note_rollout(loaded.recipe, shared, tokenizer, note)
    return list(calls.values())


def note_training(recipe: Recipe, shared: SharedBase, note: Note) -> None:
    """Note the attention calls of SFT's forward pass, for batches of several lengths, without and with a mask."""
    sft = recipe.options(Sft)
    rows, length = sft.per_device_train_batch_size, sft.max_length
    for shorter in SHORTER:
        ids = torch.full((rows, max(2, length - shorter)), 3, device=shared.device)
        for padded in (False, True):
            mask = torch.ones_like(ids)
            mask[-1, ids.shape[1] // 2 :] = 0
            with (
                recording(f"training{', masked as no stage does' if padded else ''}", note),
                mixed_precision(shared.base),
                torch.no_grad(),
            ):
                shared.base.get_decoder()(input_ids=ids, attention_mask=mask if padded else None, use_cache=False)


def note_rollout(recipe: Recipe, shared: SharedBase, tokenizer: DialogueTokenizer, note: Note) -> None:
    """Note the attention calls of prefill and decoding in PPO's rollout, of decoding those through a mask.

    A step whose rows read their own tokens calls another function (rlhf/rollout/own_tokens.py).
    """
    options = recipe.options(Ppo)
    prompts = [[3] * (options.max_prompt_length - row % 3) for row in range(options.rollout_batch_size)]
    sampling = Sampling(options.max_prompt_length, options.response_length, 1.0, options.rollout_batch_size)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with recording(name, note):
            yield

    with (
        mock.patch("rlhf.rollout.library_decoding.GRAPHS", False),
        mock.patch.dict("rlhf.rollout.own_tokens.BY_DEVICE", {shared.device.type: False}),
    ):
        sample(shared.base, prompts, tokenizer, sampling, phase=phase)


@contextmanager
def recording(label: str, note: Note) -> Iterator[None]:
    """Note attention calls and return zeros for them, so that no kernel has seen a shape before it is timed."""

    def stand_in(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        **keywords: Any,
    ) -> torch.Tensor:
        note(label, q, k, v, attn_mask, keywords)
        return q.new_zeros(*q.shape[:-1], v.shape[-1])

    with mock.patch.object(F, "scaled_dot_product_attention", stand_in):
        yield


def _time(call: Call) -> KernelTime:
    """Return the kernel, and milliseconds of the first and of a later call; in training with the backward pass."""
    q, k, v = call.inputs
    keywords = {name: value for name, value in call.options.items() if value is not None}

    def work() -> None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=call.mask, **keywords)
        if out.requires_grad:
            out.sum().backward()

    chosen = torch._fused_sdp_choice(
        q,
        k,
        v,
        call.mask,
        0.0,
        keywords.get("is_causal", False),
        scale=keywords.get("scale"),
        enable_gqa=keywords.get("enable_gqa", False),
    )
    milliseconds = []
    for _ in range(4):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - start))
    return {
        "kernel": KERNELS.get(chosen, str(chosen)),
        "first_ms": milliseconds[0],
        "later_ms": sorted(milliseconds[1:])[1],
    }


def _decision(table: KernelTable, masked: Mapping[str, bool], dry_run: bool) -> Decision:
    """Return whether every shape has the expected kernel and none waits for a plan.

    The first call of each kind loads kernels and is left out.
    """
    timed: dict[str, KernelTime] = {}
    for label, row in table.items():
        if isinstance(row, str):
            return Decision(False, f"{label}: {row}")
        timed[label] = row
    unexpected = [
        f"{label}: {row['kernel']}"
        for label, row in timed.items()
        if row["kernel"] != ("efficient" if masked[label] else "flash")
    ]
    kinds: set[tuple[str, bool]] = set()
    waits = []
    for label, row in timed.items():
        kind = (label.split(",")[0], masked[label])
        if kind in kinds and row["first_ms"] - row["later_ms"] > PLAN_MS:
            waits.append(f"{label}: {row['first_ms']:.0f} ms")
        kinds.add(kind)
    example = f" ({unexpected[0]})" if unexpected else ""
    why = f"{len(table)} shapes, {len(unexpected)} with another kernel{example}, {len(waits)} with a plan"
    return Decision(None if dry_run else not unexpected and not waits, why)
