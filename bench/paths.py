"""Folders that the benchmarks read and write."""

from pathlib import Path

from rlhf.errors import UserError

ROOT = Path(__file__).parents[1]  # of the code: a checkout, or /app in the container image
# Records of the working directory first: an image holds only code, and is run in the caller's checkout.
RESULTS = next((folder for folder in (Path("results"), ROOT / "results") if folder.is_dir()), Path("results"))


def newest(folder: Path, pattern: str = "*.json") -> Path:
    """Return the newest of some records; their names begin with the date."""
    return max(folder.glob(pattern), key=lambda file: file.name)


def require_own_folder(folder: Path, mark: str) -> None:
    """Raise UserError for a folder that is about to be emptied and holds files, but not `mark`, which ours have."""
    if folder.exists() and any(folder.iterdir()) and not (folder / mark).exists():
        raise UserError(f"{folder}: holds other files; name a new folder")
