"""What is predicted for a program, as text and as JSON: its phases, the card's verdict, and who holds the peak."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from peakmem import cards
from peakmem.depth import deepen
from peakmem.events import WHOLE, Event, NotPredicted, Reserved, StorageKind
from peakmem.replaying import replay
from peakmem.script import Made, Record

LARGEST = 10  # tensors, or groups of alike ones, that are shown
HOLDERS = {  # what a reader calls the components of a peak
    "weights": ("base", "quantization", "adapters", "heads"),
    "gradients": ("gradients",),
    "optimizer states": ("optimizer",),
    "activations": ("activations",),
    "logits": ("logits",),
    "key-value cache": ("kv_cache",),
    "buffers": ("buffers",),
    "temporaries": ("temporaries",),
    "inside kernels": ("kernels",),
}


@dataclass
class Held:
    """Alike tensors that are alive at the peak."""

    line: str
    shape: tuple[int, ...]
    dtype: str
    component: str
    number: int
    bytes: int  # of all


@dataclass
class Prediction:
    """What is predicted. All sizes are bytes."""

    card: cards.Card
    phases: dict[str, Reserved]
    layers: int | None
    steps: int
    ended: str
    parts: dict[str, int]  # of the peak, by HOLDERS and `workspaces and rounding`
    largest: list[Held]
    paged: int
    assumed: dict[str, int] = field(default_factory=dict)
    peak_phase: str = WHOLE

    @property
    def needed(self) -> int:
        """Return the bytes of the card: what is reserved, unified memory, and the driver's context."""
        return self.phases[WHOLE].reserved + self.paged + cards.CONTEXT

    @property
    def total(self) -> int:
        """Return the bytes that the card has."""
        assert self.card.memory
        return int(self.card.memory.gb * 1e9)

    @property
    def fits(self) -> bool:
        """Return whether the card has what is needed."""
        return self.needed <= self.total


def of_run(card: cards.Card, record: Record) -> Prediction:
    """Return what is predicted from a run of all layers."""
    sources = range(len(record.made))
    return _prediction(card, record, record.events, record.components, list(sources), None)


def of_depths(card: cards.Card, shallow: Record, deeper: Record) -> Prediction:
    """Return what is predicted from runs with few layers. Raises NotPredicted where they do not match."""
    stack = deeper.stack
    assert stack
    try:
        deep = deepen(shallow.events, deeper.events, stack.layers, stack.depths, stack.period)
    except NotPredicted as error:
        raise NotPredicted(f"{error}; --full runs all {stack.layers} layers") from error
    components = [deeper.components[source] for source in deep.sources]
    return _prediction(card, deeper, deep.events, components, deep.sources, stack.layers)


def _prediction(
    card: cards.Card,
    record: Record,
    events: Sequence[Event],
    components: Sequence[StorageKind],
    sources: Sequence[int],
    layers: int | None,
) -> Prediction:
    if not any(event.storage is not None for event in events):
        raise NotPredicted("the program has put nothing on the card; does it say `cuda`?")
    config = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    phases = replay(
        events, "expandable_segments:true" in config.lower().replace(" ", ""), cards.workspace(card.gpu.capability)
    )
    alive, phase = _alive_at_peak(events)
    parts: Counter[str] = Counter()
    groups: dict[tuple[Made, str], list[int]] = {}
    for storage, size in alive.items():
        kind = components[storage]
        name = next(name for name, kinds in HOLDERS.items() if kind in kinds)
        parts[name] += size
        groups.setdefault((record.made[sources[storage]], name), []).append(size)
    parts["workspaces and rounding"] = max(0, phases[WHOLE].allocated - sum(parts.values()))
    held = [Held(m.line, m.shape, m.dtype, name, len(sizes), sum(sizes)) for (m, name), sizes in groups.items()]
    held.sort(key=lambda h: -h.bytes)
    paged = max((peak.paged for peak in record.peaks.values()), default=0)
    return Prediction(
        card,
        {"/".join(name.split("/")): reserved for name, reserved in phases.items()},
        layers,
        record.steps,
        record.ended,
        {name: parts[name] for name in (*HOLDERS, "workspaces and rounding") if parts[name]},
        held[:LARGEST],
        paged,
        dict(record.assumed),
        "/".join(phase),
    )


def _alive_at_peak(events: Sequence[Event]) -> tuple[dict[int, int], tuple[str, ...]]:
    """Return what is alive when most is, {storage: bytes}, and the phase then."""
    total = most = at = 0
    for index, event in enumerate(events):
        total += event.bytes
        if total > most:
            most, at = total, index
    alive: dict[int, int] = {}
    for event in events[: at + 1]:
        if event.storage is None:
            continue
        if event.bytes > 0:
            alive[event.storage] = event.bytes
        else:
            del alive[event.storage]
    return alive, events[at].phase


def as_json(found: Prediction) -> str:
    """Return a prediction as one JSON object; sizes are bytes."""
    return json.dumps(
        {
            "card": found.card.words,
            "allocated": found.phases[WHOLE].allocated,
            "reserved": found.phases[WHOLE].reserved,
            "needed": found.needed,
            "card_bytes": found.total,
            "fits": found.fits,
            "layers": found.layers,
            "steps": found.steps,
            "ended": found.ended,
            "phases": {
                name: {"allocated": r.allocated, "reserved": r.reserved} for name, r in found.phases.items() if name
            },
            "peak_in": found.peak_phase,
            "parts": found.parts,
            "largest": [vars(held) for held in found.largest],
            "unified_memory": found.paged,
            "assumed": found.assumed,
        },
        indent=1,
    )


def as_text(found: Prediction) -> str:
    """Return a prediction as a page; sizes in GB of 10⁹ bytes."""
    whole = found.phases[WHOLE]
    lines = [f"{'phase':<28}{'allocated':>12}{'reserved':>12}   GB, predicted"]
    shown = {name: r for name, r in found.phases.items() if "/" in name}
    for name, reserved in (*shown.items(), ("whole run", whole)):
        lines.append(f"{name:<28}{_gb(reserved.allocated):>12}{_gb(reserved.reserved):>12}")
    verdict = "fits" if found.fits else "does not fit"
    beside = f" + {_gb(found.paged)} unified" if found.paged else ""
    lines += [
        "",
        f"{verdict} the {found.card.words}: {_gb(found.needed)} of {_gb(found.total)} GB"
        f" ({_gb(whole.reserved)} reserved{beside} + {_gb(cards.CONTEXT)} for CUDA's context, a guess)",
        "",
        f"at the peak, in {found.peak_phase or 'the start'}:",
        *(f"  {name:<26}{_gb(size):>12}" for name, size in found.parts.items()),
        "",
        "largest tensors then:",
        *(_row(held) for held in found.largest),
        "",
        f"{found.steps} optimizer step{'s' * (found.steps != 1)} were run"
        + (f" with few of {found.layers} equal layers, and repeated up to all" if found.layers else ""),
    ]
    if found.assumed:
        lines += [
            "assumed, or not counted:",
            *(f"  {what}" + f" ({n} times)" * (n > 1) for what, n in list(found.assumed.items())[:20]),
        ]
    return "\n".join(lines)


def _row(held: Held) -> str:
    number = f"{held.number} × " if held.number > 1 else ""
    shape = f"{number}{'×'.join(map(str, held.shape))} {held.dtype}"
    return f"  {_gb(held.bytes):>7}  {held.component:<17} {shape:<34} {held.line}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.3f}"
