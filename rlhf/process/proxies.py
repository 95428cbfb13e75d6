"""The proxies that the environment names: addresses on this machine go around them."""

from contextlib import suppress
from urllib.parse import urlsplit

HERE = {"localhost", "127.0.0.1", "0.0.0.0", "::1", "::"}


def is_local(url: str) -> bool:
    """Return whether an address is on this machine, by its name or number."""
    with suppress(ValueError):  # not an address
        return urlsplit(url).hostname in HERE
    return False
