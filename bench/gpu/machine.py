"""The item about the card alone: its facts, its rates, and the packages beside it."""

import re

import torch

from bench.ceilings import ceilings
from bench.gpu import packages
from bench.gpu.item import Context
from bench.gpu.measured import DeviceFigures
from bench.gpu.record import Decision
from bench.gpu.smi import smi

OLDEST = (8, 0)  # compute capability with bfloat16 in the matrix units
OLDEST_DRIVER = 580  # torch's wheel is built for CUDA 13.0


def device(context: Context[DeviceFigures]) -> Decision:
    """Record the card, its driver and settings, the packages, and the rates of a large product and a large copy."""
    measured = context.measured
    measured["other_packages"], measured["without"] = packages.report(), packages.optional()
    if context.device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        measured["capability"] = [properties.major, properties.minor]
        measured["multiprocessors"] = properties.multi_processor_count
        measured["l2_bytes"] = getattr(properties, "L2_cache_size", None)
        measured["cudnn"] = torch.backends.cudnn.version()
        measured["cudnn_attention"] = torch.backends.cuda.cudnn_sdp_enabled()
        measured["smi"] = smi("driver_version,clocks.sm,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current")
    context.save()
    measured["ceilings"] = ceilings(context.device, torch.bfloat16)
    if context.dry_run:
        return Decision(None, "a dry run decides nothing")
    return decision(measured)


def decision(measured: DeviceFigures) -> Decision:
    """Return whether card, driver and packages are those that recipes need; None where only the driver is unknown."""
    capability, differing = tuple(measured["capability"]), len(measured["other_packages"])
    driver = re.match(r"\d+", measured["smi"] or "")
    rates = measured["ceilings"]
    why = f"{rates['flops'] / 1e12:.0f} TFLOP/s, {rates['bandwidth'] / 1e12:.2f} TB/s, {differing} packages differ"
    why += f", compute capability {'.'.join(map(str, capability))}, driver {driver[0] if driver else 'unknown'}"
    if capability < OLDEST or differing or (driver and int(driver[0]) < OLDEST_DRIVER):
        return Decision(False, why)
    return Decision(True if driver else None, why)
