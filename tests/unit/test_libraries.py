"""Libraries that are imported without what takes long."""

import gc
from typing import Any

from rlhf.process.libraries import _at_first_call, without_collections


def test_a_function_is_compiled_once_when_it_is_first_called():
    compiled: list[Any] = []

    def compile_now(function, **options):
        compiled.append((function.__name__, options))
        return lambda x: function(x) + 100

    compile_later = _at_first_call(compile_now)

    @compile_later
    def plain(x):
        return x

    @compile_later(dynamic=False)
    def with_options(x):
        return 2 * x

    called = compile_later(lambda x: 3 * x, mode="default")
    assert not compiled and plain.__name__ == "plain"
    assert [plain(1), plain(2), with_options(1), called(1)] == [101, 102, 102, 103]
    assert compiled == [("plain", {}), ("with_options", {"dynamic": False}), ("<lambda>", {"mode": "default"})]


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
