"""Files of the hub at one commit, why it gave nothing, and the way out."""


def snapshot(name: str, revision: str, data_dir: str | None) -> str:
    """The folder of a data set at a commit, in the hub's cache; what is missing there is downloaded."""
    from huggingface_hub import snapshot_download

    return snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=data_patterns(data_dir))


def data_patterns(data_dir: str | None) -> list[str]:
    """Which files of a data set are used."""
    return [f"{data_dir}/*", "*.md"] if data_dir else ["*"]


def reason(error: BaseException, page: str, revision: str | None, offline: str) -> str:
    """One line: the error with what to do about it. `page`: the repository's; `offline`: what helps without network."""
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    found = text[:300]
    if "OfflineMode" in text or "HF_HUB_OFFLINE" in text or "LocalEntryNotFound" in type(error).__name__:
        return f"{found}; `rlhf fetch` (make: fetch) downloads what a recipe needs, where there is network"
    if "gated" in text.lower() or "401" in text or "403" in text:
        return f"{page} is gated: accept its licence there, then `hf auth login` or set HF_TOKEN ({found})"
    if "revision" in text.lower() or "is not a valid git identifier" in text:
        return f"revision {revision} is not there: copy a commit from {page}/commits ({found})"
    return f"{found}; {offline}"
