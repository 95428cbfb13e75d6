"""Peak GPU memory of a PyTorch program, predicted without a GPU.

A name is imported when it is first used, so that those which need no torch do not load it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peakmem import cards, events
    from peakmem.depth import deepen, highest_at_depth
    from peakmem.device import StandIn
    from peakmem.events import NotPredicted
    from peakmem.predicting import predict
    from peakmem.replaying import replay
    from peakmem.tensors import known_numbers
    from peakmem.tracker import Tracker

__all__ = [
    "NotPredicted",
    "StandIn",
    "Tracker",
    "cards",
    "deepen",
    "events",
    "highest_at_depth",
    "known_numbers",
    "predict",
    "replay",
]

_MODULES = {
    "NotPredicted": "events",
    "StandIn": "device",
    "Tracker": "tracker",
    "deepen": "depth",
    "highest_at_depth": "depth",
    "known_numbers": "tensors",
    "predict": "predicting",
    "replay": "replaying",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'peakmem' has no attribute {name!r}")
    return getattr(import_module(f"peakmem.{_MODULES[name]}"), name)
