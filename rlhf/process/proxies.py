"""The proxies that the environment names: addresses on this machine go around them."""

import ipaddress
import urllib.request
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


def in_words(url: str) -> str:
    """Return which proxy requests to an address go through, without its password; empty if they go through none."""
    named = urllib.request.getproxies()
    with suppress(ValueError):  # not an address
        address = urlsplit(url)
        kind = next((kind for kind in (address.scheme, "all") if named.get(kind)), None)
        if kind and not is_local(url) and not urllib.request.proxy_bypass(address.hostname or ""):
            return f" through the proxy {named[kind].rpartition('@')[2]} ({kind}_proxy; no_proxy names exceptions)"
    return ""
