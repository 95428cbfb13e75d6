"""What NVIDIA's driver says about the card, by nvidia-smi: a process that asks so takes none of the card's memory."""

import re
import subprocess

MIB = 1 << 20


def smi(query: str) -> str | None:
    """Return the values of a query, a line for each card; None where nvidia-smi cannot be run."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def used_bytes() -> int | None:
    """Return the memory in use on the only card, by all processes and the driver; None if not known, or of several."""
    match = re.fullmatch(r"([0-9]+) MiB", smi("memory.used") or "")
    return int(match[1]) * MIB if match else None
