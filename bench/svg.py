"""The frame of the pictures that the benchmarks draw."""

from collections.abc import Iterable


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
