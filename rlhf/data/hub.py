"""Why the hub gave nothing, and the way out."""


def reason(error: BaseException, page: str, revision: str | None, offline: str) -> str:
    """One line: the error with what to do about it. `page`: the repository's; `offline`: what helps without network."""
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    found = text[:300]
    if "gated" in text.lower() or "401" in text or "403" in text:
        return f"{page} is gated: accept its licence there, then `hf auth login` or set HF_TOKEN ({found})"
    if "revision" in text.lower() or "is not a valid git identifier" in text:
        return f"revision {revision} is not there: copy a commit from {page}/commits ({found})"
    return f"{found}; {offline}"
