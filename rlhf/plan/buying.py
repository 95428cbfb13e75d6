"""Renting a card or buying it: the use from which buying costs less."""

from typing import NamedTuple

from rlhf.files import JsonObject
from rlhf.recipe import PinnedRecipe

HOURS_PER_YEAR = 8760
CARD, YEARS = "card_usd", "break_even_years"  # metrics of the figures that a guide publishes about this


class BreakEven(NamedTuple):
    """When a card for `card_usd` dollars has cost as much as renting one at `per_hour`: in hours of use, and in years.

    The years are without a pause. `guide` has published `guide_years`; it also named the card's price unless the user
    did. Power, the machine around the card and what it is sold for are not counted.
    """

    card_usd: float
    per_hour: float
    hours: float
    years: float
    price_of: str  # who named the card's price
    guide: str | None
    guide_years: float | None

    def in_words(self) -> str:
        """Return a line: after how long buying costs less, and what the guide says."""
        says = f"; the {self.guide} says {self.guide_years:g} years" if self.guide else ""
        return (
            f"buying: a card for ${self.card_usd:,.0f} ({self.price_of}) costs as much as {self.hours:,.0f} rented "
            f"hours at ${self.per_hour:g}, {self.years:.1f} years without a pause{says}"
        )

    def as_json(self) -> JsonObject:
        """Return the figures as JSON's types."""
        return dict(self._asdict())


def break_even(loaded: PinnedRecipe, per_hour: float | None, card_usd: float | None = None) -> BreakEven | None:
    """Return the break-even at a price of an hour; None where this is not known or 0, and without a card's price.

    Without `card_usd` the price is the one that the recipe's guide publishes.
    """
    published = {figure.metric: figure for figure in loaded.figures if figure.metric in (CARD, YEARS)}
    price, years = published.get(CARD), published.get(YEARS)
    named = price.value if price else None
    card = named if card_usd is None else card_usd
    if card is None or not per_hour:
        return None
    hours = card / per_hour
    return BreakEven(
        card,
        per_hour,
        hours,
        hours / HOURS_PER_YEAR,
        price_of=f"the {price.guide}'s price" if price and card_usd is None else "--buy",
        guide=years.guide if years else None,
        guide_years=years.value if years else None,
    )
