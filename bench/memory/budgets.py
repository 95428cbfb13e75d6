"""Predicted peaks of every recipe, pinned beside it in predicted.json, so that a change of them is noticed.

More memory may not fit the card. Less is either a gain or an error of the prediction, which would let a stage start
that runs out of memory; who changes it says which, and pins it anew.
"""

from collections.abc import Iterator
from pathlib import Path

from rlhf import recipe as recipes
from rlhf.errors import UserError, no_such
from rlhf.plan import prediction_file, published_figures
from rlhf.plan.phases import ON_HOST
from rlhf.plan.predict import PREDICTED_STAGES, Predictor
from rlhf.plan.prediction_file import PREDICTION_FILE, Needs, Passes, Peaks, Pinned, Step, Works
from rlhf.plan.strategies import StrategyCost, costs_alone
from rlhf.recipe import PinnedRecipe
from rlhf.terminal.wording import GB, gb

MORE = 0.03  # by which a phase's peak or need may exceed what is pinned
LESS = 0.01  # by which it may fall below
WORK = 0.01  # by which operations, bytes and launches of a phase may differ, which are counted
PLACES = {"per_layer": "in a layer", "per_plain_layer": "in a layer without adapters", "outside": "outside the layers"}
NAMES = {"flops": "matrix operations", "moved": "bytes moved", "launched": "launches"}


def pinned_recipes(root: Path) -> list[Path]:
    """Return the folders of the recipes that are made for a card."""
    return [d for d in recipes.available(root) if recipes.load(d).recipe.hardware.memory_gb is not None]


def strategies(predictor: Predictor, loaded: PinnedRecipe) -> dict[str, StrategyCost] | None:
    """Return what each way to save memory does to SFT's step; None where the recipe's source publishes none of it."""
    published = any(target.metric and target.metric.startswith("effect.") for target in loaded.figures)
    return costs_alone(predictor.predict, loaded, "sft") if published else None


def content(directory: Path) -> Pinned:
    """Return what is pinned beside a recipe. Raises UserError, which names file and key, where it is damaged."""
    found = prediction_file.read(directory)
    if found is None:
        file = directory / PREDICTION_FILE
        raise UserError(no_such("file", file, "`make budgets ARGS=--write` pins what is predicted"))
    return found


def pinned(directory: Path) -> Peaks:
    """Return the pinned bytes of every phase's peak by component."""
    return content(directory).stages


def pinned_step(directory: Path) -> Step:
    """Return the operations of a decoding step that are pinned; empty where none are."""
    return content(directory).decoding_step


def pinned_passes(directory: Path) -> Passes:
    """Return the operations of a layer in an update that are pinned; empty where none are."""
    return content(directory).update_pass


def pinned_needs(directory: Path) -> Needs:
    """Return the bytes that each phase needs as they are pinned; empty where none are."""
    return content(directory).needed


def changed_needs(before: Needs, now: Needs) -> Iterator[str]:
    """Yield one line for each pinned phase that is gone, or whose need is not within `MORE` and `LESS`."""
    for stage, phases in before.items():
        for phase, old in phases.items():
            new = now.get(stage, {}).get(phase)
            if new is None:
                yield f"{stage}/{phase}: what it needs of the card is pinned and no longer predicted"
            elif not round(old * (1 - LESS)) <= new <= round(old * (1 + MORE)):
                direction = "more" if new > old else "less"
                yield f"{stage}/{phase} needs {abs(new / old - 1):.1%} {direction} of the card: {gb(new)} GB"


def pinned_work(directory: Path) -> Works:
    """Return what each phase computes, moves and launches as it is pinned; empty where none is."""
    return content(directory).work


def changed_work(before: Works, now: Works) -> Iterator[str]:
    """Yield one line for each pinned phase that computes, moves or launches more or less than `WORK` allows.

    Phases that come and go are named by `changed_peaks`. Less is named too: what stays pinned would hide a later loss.
    """
    for stage, phases in before.items():
        for phase, old in phases.items():
            new = now.get(stage, {}).get(phase, old)
            for key, count in old.items():
                change = new[key] / count - 1 if count else float(new[key] > 0)
                if abs(change) > WORK:
                    direction = "more" if change > 0 else "fewer"
                    yield f"{stage}/{phase}: {abs(change):.1%} {direction} {NAMES[key]}, {count:,} to {new[key]:,}"


def more_operations(before: Step, now: Step) -> Iterator[str]:
    """Yield one line for each role whose decoding step has more operations than are pinned, or none pinned."""
    for role, counts in now.items():
        for where, count in counts.items():
            old = before.get(role, {}).get(where)
            place = PLACES[where]
            if old is None:
                yield f"decoding step of {role}: {count} operations {place}, and none pinned"
            elif count > old:
                yield f"decoding step of {role}: {count} operations {place}, where {old} are pinned"


def changed_passes(before: Passes, now: Passes) -> Iterator[str]:
    """Yield one line for each trunk and pass of an update whose layer has another number of operations than pinned.

    Fewer are named too: what stays pinned would hide a later loss.
    """
    for trunk, counts in now.items():
        for name, count in counts.items():
            if (old := before.get(trunk, {}).get(name)) != count:
                yield f"update, trunk {trunk}: {count} operations in the {name} pass of a layer, {old} are pinned"


def changed_peaks(before: Peaks, now: Peaks) -> Iterator[str]:
    """Yield one line for each phase that is missing, new, or not within `MORE` and `LESS`, with what changed most."""
    for stage in {**before, **now}:
        were, are = before.get(stage, {}), now.get(stage, {})
        for phase in {**were, **are}:
            if phase not in were or phase not in are:
                yield f"{stage}/{phase} is {'new' if phase in are else 'gone'}"
                continue
            old, new = were[phase], are[phase]
            more = sum(new.values()) / sum(old.values()) - 1
            if not -LESS <= more <= MORE:
                changes = {part: new.get(part, 0) - old.get(part, 0) for part in {**old, **new}}
                most = (max if more > 0 else min)(changes, key=changes.__getitem__)
                verb = "grew" if more > 0 else "shrank"
                yield (
                    f"{stage}/{phase} {verb} by {abs(more):.1%} to {gb(sum(new.values()))} GB: "
                    f"{most} {changes[most] / GB:+.2f} GB"
                )


def peaks_table(root: Path) -> str:
    """Return the pinned peaks of every recipe as Markdown, in GB; "–" where the recipe has no such stage."""
    recipes_stages = {f"{d.parent.name} {d.name}": pinned(d) for d in pinned_recipes(root)}
    had = {stage for stages in recipes_stages.values() for stage in stages}
    shown = [stage for stage in PREDICTED_STAGES if stage in had and stage not in ON_HOST]
    lines = ["| recipe | " + " | ".join(shown) + " |", "| --- |" + " ---: |" * len(shown)]
    for name, stages in recipes_stages.items():
        cells = " | ".join(
            gb(max(sum(parts.values()) for parts in stages[stage].values()), 1) if stage in stages else "–"
            for stage in shown
        )
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def strategies_table(directory: Path) -> str:
    """Return the pinned effects of the strategies as Markdown, beside what is published about each."""
    effects = content(directory).strategies
    loaded = recipes.load(directory)
    lines = ["| strategy, alone | peak, GB | memory | operations | published |", "| --- | ---: | ---: | ---: | --- |"]
    before = effects["none"].peak_bytes
    for name, effect in effects.items():
        peak = effect.peak_bytes
        change = "" if name == "none" else f"{(peak - before) / GB:+.1f} GB, {peak / before - 1:+.0%}"
        factor = f"x {effect.flops:.2f}"
        published = "; ".join(published_figures.of_strategy(loaded, name))
        lines.append(f"| {name} | {gb(peak, 1)} | {change} | {factor} | {published} |")
    return "\n".join(lines)
