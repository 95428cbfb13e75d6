"""Libraries that are imported without what takes long."""

import gc

from rlhf.process.libraries import without_collections


def test_no_collection_looks_at_libraries():
    before = gc.get_freeze_count()
    with without_collections():
        assert not gc.isenabled()
        kept: list[list[int]] = [[] for _ in range(1000)]  # as an import makes objects
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(kept)
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled(), "as it was"
    finally:
        gc.enable()
