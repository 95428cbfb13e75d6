"""Libraries that are imported without what takes long."""

import gc
import subprocess
import sys
from typing import Any

import pytest

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


@pytest.mark.parametrize("first", ["bench", "rlhf.process.libraries"])
def test_a_notice_of_bitsandbytes_is_not_printed(tmp_path, first):
    """Its own stands for the advice that it logs on some CPUs while it is imported, by whatever library."""
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    notice = "import logging; logging.getLogger('bitsandbytes.backends.cpu.ops').warning('pip install kernels')\n"
    (package / "__init__.py").write_text(notice)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += f"import {first}\nassert 'torch' not in sys.modules\nimport bitsandbytes\n"
    code += f"assert bitsandbytes.__file__.startswith({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_check_for_a_gpu_prints_no_notice_of_a_library():
    code = "from rlhf import recipe\nfrom rlhf.recipe.folders import default_root\nfrom rlhf.errors import UserError\n"
    code += "from rlhf.stages import runner\n"
    code += "try: runner.check_device(recipe.load(recipe.resolve('4090', default_root())))\n"
    code += "except UserError: pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "kernels" not in done.stderr, done.stderr


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
