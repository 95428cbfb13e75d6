"""What a plan adds to its tables."""

from typing import Any

from rlhf.cli import plan_tables as tables


def made(needed: float, price: float | None = None) -> dict[str, Any]:
    stage = {"needed_bytes": round(needed * 1e9), "in_memory_of": "cuda", "projected_hours": 2.0}
    on_host = {"needed_bytes": 90 * 10**9, "in_memory_of": "host"}
    return {"card_bytes": 25 * 10**9, "price_per_hour": price, "stages": {"sft": stage, "merge": on_host}}


def test_a_card_that_is_far_from_full_is_said_to_have_room():
    (line, _) = tables.hints(made(11.0))
    assert line.startswith("at most 11.00 of 25.00 GB are needed: --fastest (make: FIT=card)")
    assert not [line for line in tables.hints(made(20.0)) if "--fastest" in line]


def test_the_price_is_asked_for_where_it_would_make_a_cost():
    assert "make: PRICE=" in tables.hints(made(20.0))[0]
    assert tables.hints(made(20.0, price=2.5)) == []
