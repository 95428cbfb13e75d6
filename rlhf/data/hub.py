"""Downloads from the hub at one commit, and how a failed one is described."""

from typing import Any

from rlhf.terminal import excerpt


def licence(card: Any) -> str:
    """Return the licence that a repository's card names; "not stated" without one. `card`: the hub's, or None."""
    return str((card.get("license_name") or card.get("license") if card else None) or "not stated")


def snapshot(name: str, revision: str, data_dir: str | None) -> str:
    """Return the folder of a data set at a commit in the hub's cache; missing files are downloaded."""
    from huggingface_hub import snapshot_download

    return snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=data_patterns(data_dir))


def data_patterns(data_dir: str | None) -> list[str]:
    """Return the patterns of the files of a data set that are used."""
    return [f"{data_dir}/*", "*.md"] if data_dir else ["*"]


def reason(error: BaseException, page: str, way_out: str) -> str:
    """Describe an error and what to do about it, in one line. `page` is the repository's."""
    cause = str(error.__cause__ or "")
    text = " ".join(f"{error} {'' if cause in str(error) else cause}".split())
    return (
        f"{excerpt(text).removesuffix('.')}; {way_out}. Commits and the licence of a gated repository are at {page} "
        "(HF_TOKEN says who accepted it); without network there is what `rlhf fetch` has downloaded"
    )
