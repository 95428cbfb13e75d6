"""Sizes of memory, as options and variables name them."""

import re


def size_in_bytes(text: str) -> int | None:
    """Return the bytes of a size such as `12GB` or `1.5 GiB`; None for all else, as a number without a unit."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(GB|GiB)", text, re.IGNORECASE)
    if not match or not float(match[1]):
        return None
    return round(float(match[1]) * (2**30 if match[2].lower() == "gib" else 10**9))
