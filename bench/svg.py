"""The pictures that the benchmarks draw, as SVG: a frame, and two axes with their grid, lines and dots."""

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import NamedTuple

GREY = "#666"


class Axes(NamedTuple):
    """Size and margins of a picture in pixels, and the share of each axis, 0 to 1, at which a value stands."""

    wide: int
    high: int
    left: int
    right: int
    top: int
    bottom: int
    across: Callable[[float], float]
    up: Callable[[float], float]

    def x(self, value: float) -> float:
        """Return the place of a value across the picture."""
        return self.left + self.across(value) * (self.wide - self.left - self.right)

    def y(self, value: float) -> float:
        """Return the place of a value down the picture."""
        return self.high - self.bottom - self.up(value) * (self.high - self.bottom - self.top)

    def grid(self, across: Mapping[float, str], up: Mapping[float, str]) -> list[str]:
        """Return a line with its text for each tick of both axes."""
        ground, end = self.high - self.bottom, self.wide - self.right
        parts = []
        for value, text in across.items():
            parts.append(f'<path d="M{self.x(value):.1f} {self.top}V{ground}" stroke="#eee"/>')
            parts.append(f'<text x="{self.x(value):.1f}" y="{ground + 17}" text-anchor="middle">{text}</text>')
        for value, text in up.items():
            parts.append(f'<path d="M{self.left} {self.y(value):.1f}H{end}" stroke="#eee"/>')
            parts.append(f'<text x="{self.left - 8}" y="{self.y(value) + 4:.1f}" text-anchor="end">{text}</text>')
        return parts

    def titles(self, across: str, up: str, note: str) -> list[str]:
        """Return the names of both axes, and a note below them."""
        middle, down = (self.left + self.wide - self.right) / 2, (self.high - self.bottom + self.top) / 2
        return [
            f'<text x="{middle:.0f}" y="{self.high - 25}" text-anchor="middle">{across}</text>',
            f'<text x="{middle:.0f}" y="{self.high - 8}" text-anchor="middle" fill="{GREY}">{note}</text>',
            f'<text transform="translate(16 {down:.0f}) rotate(-90)" text-anchor="middle">{up}</text>',
        ]

    def line(self, points: Iterable[tuple[float, float]], colour: str, opacity: float = 1.0) -> str:
        """Return a line through points."""
        places = " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in points)
        ink = f'stroke="{colour}" stroke-width="1.6" stroke-opacity="{opacity:g}"'
        return f'<polyline points="{places}" fill="none" {ink}/>'

    def dot(self, point: tuple[float, float], colour: str, title: str = "", opacity: float = 1.0) -> str:
        """Return a dot, which shows its title under a pointer."""
        at = f'cx="{self.x(point[0]):.1f}" cy="{self.y(point[1]):.1f}" r="3.8" fill="{colour}"'
        return f'<circle {at} fill-opacity="{opacity:g}"><title>{escape(title)}</title></circle>'

    def key(self, colours: Mapping[str, str], left: int, top: int) -> list[str]:
        """Return the names of lines, each behind a dot of its colour, from a place downwards."""
        return [
            f'<circle cx="{left}" cy="{top + 18 * place - 4}" r="4.5" fill="{colour}"/>'
            f'<text x="{left + 12}" y="{top + 18 * place}">{name}</text>'
            for place, (name, colour) in enumerate(colours.items())
        ]


def picture(wide: int, high: int, parts: Iterable[str]) -> str:
    """Return a picture as SVG, `wide` x `high` pixels: its parts on white."""
    size = f'viewBox="0 0 {wide} {high}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
            f'<rect width="{wide}" height="{high}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )
