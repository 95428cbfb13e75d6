"""The proxies that the environment names: addresses on this machine go around them."""

import ipaddress
from contextlib import suppress
from urllib.parse import urlsplit


def is_local(url: str) -> bool:
    """Return whether an address is on this machine: its name or number is one of the loopback device, or of any."""
    with suppress(ValueError):  # not an address
        host = (urlsplit(url).hostname or "").rstrip(".")
        if host == "localhost" or host.endswith(".localhost"):
            return True
        number = ipaddress.ip_address(host)
        number = getattr(number, "ipv4_mapped", None) or number
        return number.is_loopback or number.is_unspecified
    return False
