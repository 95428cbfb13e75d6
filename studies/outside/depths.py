"""The work of a step of a deep model, from rehearsals of it with few layers."""

from dataclasses import fields

from peakmem.events import DEPTHS, Work


def work_of_step(few: Work, more: Work, layers: int, steps: int) -> Work:
    """Return the mean work of one of `steps` steps with `layers` layers, by the line through that at both depths."""
    low, high = DEPTHS

    def line(at_low: int, at_high: int) -> int:
        return round((at_low + (layers - low) / (high - low) * (at_high - at_low)) / steps)

    return Work(*(line(getattr(few, part.name), getattr(more, part.name)) for part in fields(Work)))
