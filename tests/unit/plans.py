"""Plans made by hand, for tests of what is shown of them."""

from collections.abc import Mapping
from typing import Any

from rlhf.memory.plan import Plan, PlannedStage
from rlhf.recipe import StageName


def planned_stage(**changes: Any) -> PlannedStage:
    """A stage on a card, with the given fields changed."""
    fields: dict[str, Any] = {
        "in_memory_of": "cuda",
        "peak_bytes": 10**9,
        "card_reserved_bytes": 2 * 10**9,
        "card_needed_bytes": 10**9,
        "fits": True,
        "published_bytes": None,
        "verdict": None,
        "phases": {},
        "time": None,
        "decoding_step": None,
    }
    return PlannedStage(**fields | changes)


def planned(
    stages: Mapping[StageName, PlannedStage], card_bytes: int | None = 25 * 10**9, price: float | None = None
) -> Plan:
    """The plan of these stages on one card."""
    return Plan("r", "v1", False, "4090", card_bytes, 1, price, {}, dict(stages))
