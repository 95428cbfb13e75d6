"""Studies: what was found out once about this project's methods, run by hand; no part of the product needs them."""

from rlhf.process import libraries  # noqa: F401  # keeps bitsandbytes quiet, whoever imports it
