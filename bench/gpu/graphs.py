"""PPO's updates with captured passes and with each kernel launched, in steps as `rlhf run` takes them."""

from bench import steps
from bench.gpu.item import Context
from bench.gpu.measured import GraphFigures
from bench.gpu.plan import CAPTURED_SHARE
from bench.gpu.record import Decision
from rlhf.recipe.stages import PPO
from rlhf.stages.online.captured import LAUNCHED_EACH
from rlhf.terminal.wording import gb

CAPTURED, LAUNCHED = "captured", "launched"
VARIANTS = {CAPTURED: True, LAUNCHED: False}
STEPS = 10  # after the warm-up: in up to half of them micro-batches are of sizes that were not seen before


def measure(context: Context[GraphFigures]) -> Decision:
    """Measure the same steps twice, on rows as long as HH-RLHF's, after the same parents."""
    measured, out = context.measured, context.scratch / "runs"
    measured["updates"] = {}
    for name, on in VARIANTS.items():
        loaded = context.recipe.with_changes({"hardware.trunk": "lean", "hardware.update_graphs": on})
        count = 2 if context.dry_run else STEPS
        row = steps.measure(loaded, (PPO,), out, steps=count, shape="hh", preflight=False)[PPO]
        measured["updates"][name] = row
        if on:
            said = steps.said_by(PPO, out).read_text(encoding="utf-8").splitlines()
            measured["given_up"] = next((line for line in said if LAUNCHED_EACH in line), None)
        context.save()
        folder = out / loaded.name / loaded.version / PPO
        if folder.exists():
            folder.rename(folder.with_name(f"{PPO}-{name}"))  # a finished stage is kept
    return decision(measured, context.dry_run)


def decision(measured: GraphFigures, dry_run: bool) -> Decision:
    """Return whether graphs save a part of an update. A dry run decides nothing."""
    rows = measured["updates"]
    if lost := [name for name, row in rows.items() if row.get("out_of_memory")]:
        return Decision(False, f"out of memory: {', '.join(lost)}")
    with_graphs, without = (rows[name]["phase_seconds"]["update"]["median"] for name in (CAPTURED, LAUNCHED))
    peak = rows[CAPTURED].get("peak_vram_bytes")
    why = f"an update takes {with_graphs:.3g} s with graphs and {without:.3g} s without"
    why += f", peak {gb(peak, 1)} GB" if peak else ""
    if said := measured.get("given_up"):
        return Decision(None if dry_run else False, f"{said}; {why}")
    return Decision(None if dry_run else with_graphs <= CAPTURED_SHARE * without, why)
