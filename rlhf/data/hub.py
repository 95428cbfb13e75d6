"""Downloads from the hub at one commit, and explanations of failed ones."""

import re
from typing import Any

from rlhf.terminal import excerpt

# Phrases of the hub's libraries, which do not always keep the exception that tells the cause. They are longer than one
# word, because names of data sets, files and columns stand in the same messages.
OFFLINE = re.compile(r"\boffline mode is enabled\b")
DENIED = re.compile(r"\bgated (repo|repository|model|dataset)\b|\b40[13] (client error|unauthorized|forbidden)\b")
NO_REVISION = re.compile(r"\brevision not found\b|\bnot a valid git identifier\b|\brevision \S+ doesn't exist\b")


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


def reason(error: BaseException, page: str, revision: str | None, otherwise: str) -> str:
    """Describe an error and what to do about it, in one line.

    `page` is the repository's page; `otherwise` is the advice where no known cause fits.
    """
    causes = [error]
    while (before := causes[-1].__cause__) is not None:
        causes.append(before)
    kinds = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    cause = str(error.__cause__ or "")
    text = " ".join(f"{error} {'' if cause in str(error) else cause}".split())
    short = excerpt(text)
    words = re.sub(r"\S*://\S*", "", text).lower()  # without addresses
    if kinds & {"OfflineModeIsEnabled", "LocalEntryNotFoundError"} or OFFLINE.search(words):
        way_out = "repeat this where there is network; `rlhf fetch` downloads all that a recipe needs"
        return f"{short.removesuffix('.')}; {way_out}"
    if "GatedRepoError" in kinds or DENIED.search(words):
        return f"{page} is gated: accept its licence there, then `hf auth login` or set HF_TOKEN ({short})"
    if "RevisionNotFoundError" in kinds or NO_REVISION.search(words):
        return f"revision {revision} is not there: copy a commit from {page}/commits ({short})"
    return f"{short}; {otherwise}"


def hub_hint(name: str) -> str:
    """Explain how a data set of the hub is named, if `name` looks like one and was taken for a file; else ""."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        return ""
    return f"a data set of the hub is named by --set data.source=hub --set data.name={name} --set data.revision=COMMIT"
