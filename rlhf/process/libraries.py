"""The libraries of a process: imports that take long, and output that nobody needs."""

import atexit
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# While bitsandbytes is imported, it advises on some CPUs a package that nothing here needs. Whichever library imports
# it, it is quiet where this module was imported before: bench does so in its `__init__.py`.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


@contextmanager
def without_collections() -> Iterator[None]:
    """Import libraries in the block without garbage collection, and leave what they made out of later collections.

    Libraries make a million objects, almost none of them garbage, and each collection would look at all: that takes a
    quarter of the processor time of a stage's imports, and a third of a second for each trainer, which collects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if "triton" in sys.modules:  # 3.9 prints a report of leaks on what is still left out when the process ends
            atexit.register(gc.unfreeze)
        if enabled:
            gc.enable()


def import_bitsandbytes() -> None:
    """Import bitsandbytes, if it is installed, before peft does; the functions that it would compile run as written.

    They are for devices without kernels of its own. To compile them it imports torch's compiler, which takes a fifth of
    the processor time of a stage's imports.
    """
    from unittest import mock  # imports asyncio, which `rlhf --help` does without

    import torch

    with mock.patch.object(torch, "compile", lambda function, **_: function), suppress(ImportError):
        import bitsandbytes  # noqa: F401


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Switch off the libraries' bars, notices and telemetry, but not errors. Enter before importing transformers."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()
        for name in ("trl", "peft", "accelerate", "torch"):
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
