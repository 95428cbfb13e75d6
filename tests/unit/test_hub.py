"""What is said of a failed download: the cause that the exception or a phrase of the library names, and no other."""

import pytest
from huggingface_hub.errors import GatedRepoError, IncompleteSnapshotError, OfflineModeIsEnabled, RevisionNotFoundError

from rlhf.data import hub

PAGE, OTHERWISE = "https://huggingface.co/org/offline_rl", "check the name"
NETWORK, LICENCE, REVISION = "repeat this where there is network", "is gated: accept its licence", "is not there: copy"


def said_of(error: BaseException) -> str:
    return hub.reason(error, PAGE, "0" * 40, OTHERWISE)


def caused_by(kind: type[Exception]) -> Exception:
    """An error of another library whose cause is one of the hub's, without that one's message."""
    error = OSError("cannot be loaded")
    error.__cause__ = kind.__new__(kind)
    return error


@pytest.mark.parametrize(
    "text",
    [
        "column 'aggregated_score' is missing",
        "column revision_id is of type int64, expected string",
        "'org/offline_rl' is not a data set; neither is org/gated",
        "column 'unauthorized' is missing in row 401",
        "the columns revision and gated differ from those of the first file",
        "invalid frame at https://huggingface.co/api/revision/main/gated-repo/offline",
    ],
)
def test_a_name_in_a_message_is_no_cause(text):
    assert said_of(ValueError(text)).endswith(f"; {OTHERWISE}")


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (OfflineModeIsEnabled, NETWORK),
        (IncompleteSnapshotError, NETWORK),  # a kind of LocalEntryNotFoundError
        (GatedRepoError, LICENCE),
        (RevisionNotFoundError, REVISION),
    ],
)
def test_the_exception_below_decides(kind, advice):
    assert advice in said_of(caused_by(kind))


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("Couldn't reach the Hugging Face Hub for dataset 'x': offline mode is enabled.", NETWORK),
        ("Dataset 'x' is a gated dataset on the Hub.", LICENCE),
        ("x is a gated repository. Make sure to request access", LICENCE),
        ("403 Forbidden: None.", LICENCE),
        ("Revision 'abc' doesn't exist for dataset 'x' on the Hub.", REVISION),
        ("abc is not a valid git identifier (branch name, tag name or commit id)", REVISION),
    ],
)
def test_a_phrase_of_a_library_decides_where_the_exception_is_lost(text, advice):
    assert advice in said_of(OSError(text))
