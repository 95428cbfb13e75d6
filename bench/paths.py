"""Folders that the benchmarks read and write."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the code: a checkout, or /app in the container image
# Records of the working directory first: an image holds only code, and is run in the caller's checkout.
RESULTS = next((folder for folder in (Path("results"), ROOT / "results") if folder.is_dir()), Path("results"))
