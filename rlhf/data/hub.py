"""Files of the hub at one commit, why it gave nothing, and the way out."""

import re


def snapshot(name: str, revision: str, data_dir: str | None) -> str:
    """The folder of a data set at a commit, in the hub's cache; what is missing there is downloaded."""
    from huggingface_hub import snapshot_download

    return snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=data_patterns(data_dir))


def data_patterns(data_dir: str | None) -> list[str]:
    """Which files of a data set are used."""
    return [f"{data_dir}/*", "*.md"] if data_dir else ["*"]


def reason(error: BaseException, page: str, revision: str | None, offline: str) -> str:
    """One line: the error with what to do about it. `page`: the repository's; `offline`: what helps without network."""
    causes = [error]
    while (before := causes[-1].__cause__) is not None:
        causes.append(before)
    kinds = {type(cause).__name__ for cause in causes}
    cause = str(error.__cause__ or "")
    text = " ".join(f"{error} {'' if cause in str(error) else cause}".split())
    found = text[:300]
    words = re.sub(r"\S*://\S*", "", text).lower()  # an address may hold any of the words that are looked for
    if kinds & {"OfflineModeIsEnabled", "LocalEntryNotFoundError"} or "offline" in words:
        return f"{found}; `rlhf fetch` (make: fetch) downloads what a recipe needs, where there is network"
    refused = r"gated|unauthorized|\b40[13]\b.*(client error|forbidden)"
    if "GatedRepoError" in kinds or re.search(refused, words):
        return f"{page} is gated: accept its licence there, then `hf auth login` or set HF_TOKEN ({found})"
    if "RevisionNotFoundError" in kinds or re.search(r"revision|not a valid git identifier", words):
        return f"revision {revision} is not there: copy a commit from {page}/commits ({found})"
    return f"{found}; {offline}"


def hub_hint(name: str) -> str:
    """How a data set of the hub is named, to be added where `name` looks like one and was taken for a file."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        return ""
    return (
        f"; a data set of the hub is named by --set data.source=hub --set data.name={name} --set data.revision=COMMIT"
    )
