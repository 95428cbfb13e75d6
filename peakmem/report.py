"""What is predicted for a program, as text and as JSON: its phases, the card's verdict, and who holds the peak."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peakmem import cards, snapshot
from peakmem.depth import deepen
from peakmem.events import WHOLE, Event, NotPredicted, Reserved, StorageKind
from peakmem.evidence import CONTEXTS, Interval, interval
from peakmem.replaying import replay
from peakmem.script import Made, Record

UNCOUNTED = "workspace is not counted"
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
    record: Record  # of the run, the deeper one of two
    events: Sequence[Event]
    sources: Sequence[int]  # for each storage of the events, its number in the record
    peak_phase: str = WHOLE

    @property
    def assumed(self) -> dict[str, int]:
        """Return what was taken for true, or is not counted, with its line, and how often."""
        return dict(self.record.assumed)

    @property
    def allocated(self) -> int:
        """Return what torch.cuda.max_memory_allocated would say of the whole run."""
        return self.phases[WHOLE].allocated

    @property
    def reserved(self) -> int:
        """Return what torch.cuda.max_memory_reserved would say of the whole run."""
        return self.phases[WHOLE].reserved

    @property
    def needed(self) -> int:
        """Return the bytes of the card: what is reserved, unified memory, and the driver's context."""
        return self.reserved + self.paged + cards.CONTEXT

    @property
    def evidence(self) -> Interval:
        """Return how far cards were from predictions for programs of this kind."""
        uncounted = any(UNCOUNTED in what for what in self.record.assumed)
        return interval(uncounted, "quantization" in self.record.components)

    @property
    def between(self) -> tuple[int, int]:
        """Return the least and the most that is needed, by the evidence."""
        return tuple(self.needed + round(self.reserved * share) for share in self.evidence[1:3])  # type: ignore[return-value]

    @property
    def total(self) -> int | None:
        """Return the bytes that the card has; None where none is named."""
        assert self.card.memory
        return None if self.card == cards.ANY else int(self.card.memory.gb * 1e9)

    @property
    def fits(self) -> bool | None:
        """Return whether the card has the most that is needed; None where none is named."""
        return None if self.total is None else self.between[1] <= self.total

    @property
    def verdict(self) -> str:
        """Return `fits`, `may not fit` or `does not fit`; without a card `needs`."""
        if self.total is None:
            return "needs"
        return "fits" if self.fits else "may not fit" if self.between[0] <= self.total else "does not fit"

    def write_snapshot(self, file: Path) -> None:
        """Write the run as torch.cuda.memory._dump_snapshot would on a card; pytorch.org/memory_viz shows it."""
        made = [self.record.made[source] for source in self.sources]
        snapshot.write(file, self.events, made, _expandable(), cards.workspace(self.card.gpu))


def of_run(card: cards.Card, record: Record) -> Prediction:
    """Return what is predicted from a run of all layers."""
    sources = range(len(record.made))
    return _prediction(card, record, record.events, record.components, list(sources), None)


def of_depths(card: cards.Card, shallow: Record, deeper: Record) -> Prediction:
    """Return what is predicted from runs with few layers. Raises NotPredicted where they do not match."""
    stack = deeper.stack
    assert stack
    try:
        deep = deepen(shallow.events, deeper.events, stack.layers, stack.depths)
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
    phases = replay(events, _expandable(), cards.workspace(card.gpu))
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
        record,
        events,
        sources,
        "/".join(phase),
    )


def _expandable() -> bool:
    config = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return "expandable_segments:true" in config.lower().replace(" ", "")


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
    record = found.record
    return json.dumps(
        {
            "card": found.card.words,
            "versions": record.versions,
            "allocated": found.allocated,
            "reserved": found.reserved,
            "needed": found.needed,
            "between": found.between,
            "evidence": found.evidence._asdict(),
            "context_assumed": cards.CONTEXT,
            "card_bytes": found.total,
            "verdict": found.verdict,
            "fits": found.fits,
            "layers": found.layers,
            "steps": found.steps,
            "ended": found.ended,
            "batches": vars(record.seen) if record.seen else None,
            "not_seen": _not_seen(found),
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
    """Return a prediction as a page; sizes in GiB of 2³⁰ bytes, as torch and nvidia-smi say them."""
    versions = ", ".join(f"{name} {number}" for name, number in found.record.versions.items())
    lines = [f"predicted for {versions}", "", f"{'phase':<28}{'allocated':>12}{'reserved':>12}   GiB, predicted"]
    shown = {name: r for name, r in found.phases.items() if "/" in name}
    for name, reserved in (*shown.items(), ("whole run", found.phases[WHOLE])):
        lines.append(f"{name:<28}{_gib(reserved.allocated):>12}{_gib(reserved.reserved):>12}")
    lines += [
        "",
        *_verdict(found),
        "",
        f"at the peak, in {found.peak_phase or 'the start'}:",
        *(f"  {name:<26}{_gib(size):>12}" for name, size in found.parts.items()),
        "",
        "largest tensors then:",
        *(_row(held) for held in found.largest),
        "",
        f"{found.steps} optimizer step{'s' * (found.steps != 1)} were run"
        + (f" with few of {found.layers} equal layers, and repeated up to all" if found.layers else ""),
        *_batches(found),
        *(f"not seen: {what}" for what in _not_seen(found)),
    ]
    if found.assumed:
        lines += [
            "assumed, or not counted:",
            *(f"  {what}" + f" ({n} times)" * (n > 1) for what, n in list(found.assumed.items())[:20]),
        ]
    return "\n".join(lines)


def _verdict(found: Prediction) -> list[str]:
    low, high = found.between
    of_card = f" the {found.card.words}" if found.total else ""
    of_total = f" of {_gib(found.total)}" if found.total else ""
    beside = f" + {_gib(found.paged)} unified" if found.paged else ""
    least, most = (size / 1e9 for size in CONTEXTS)
    why = found.evidence
    lines = [
        f"{found.verdict}{of_card}: {_gib(low)} to {_gib(high)}{of_total} GiB ({found.needed / 1e9:.3f} GB expected)",
        f"  {_gib(found.reserved)} reserved{beside} + {_gib(cards.CONTEXT)} for CUDA's context, which is assumed:"
        f" {least:.2f} to {most:.1f} GB were seen",
        f"  interval: {why.words} reserved {why.low:+.1%} to {why.high:+.1%} on cards ({why.runs} runs)",
    ]
    smallest = cards.smallest(high)
    return lines if found.total else [*lines, f"  the smallest known card that has it: {smallest or 'none'}"]


def _batches(found: Prediction) -> list[str]:
    seen = found.record.seen
    if seen is None:
        return []
    of = f" of {seen.of:,}" if seen.of else ""
    line = f"largest of {seen.batches:,}{of} batches seen: number {seen.largest:,}, {seen.numbers:,} numbers"
    if seen.longest:
        line += f", with rows of {seen.longest:,} tokens"
    more = f"; the first steps had {seen.usual:,} at most, so that it was run too" if seen.numbers > seen.usual else ""
    return [line + more]


def _not_seen(found: Prediction) -> list[str]:
    """Return what the run says nothing of."""
    record = found.record
    lines = []
    if record.seen is None:
        lines.append("batches after these steps, which come from no DataLoader of torch; --steps runs more of them")
    elif record.seen.of is None or record.seen.batches < record.seen.of:
        lines.append(f"batches after the first {record.seen.batches:,}; --batches reads more")
    lines += [f"{line}: what is done with this DataLoader's data, such as an evaluation" for line in record.unread]
    lines += record.later
    return [*lines, "whatever else the program does after these steps, such as generating or saving"]


def _row(held: Held) -> str:
    number = f"{held.number} × " if held.number > 1 else ""
    shape = f"{number}{'×'.join(map(str, held.shape))} {held.dtype}"
    return f"  {_gib(held.bytes):>7}  {held.component:<17} {shape:<34} {held.line}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f}"
