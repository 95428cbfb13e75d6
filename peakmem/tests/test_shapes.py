"""Remembered shapes give what torch would."""

import pytest
import torch

from peakmem.shapes import Shapes

aten = torch.ops.aten
META = torch.device("meta")


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def facts(out: object) -> list[object]:
    results = out if isinstance(out, list | tuple) else [out]
    return [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in results]


CALLS = [
    (aten.add.Tensor, (on_meta(4, 8), on_meta(8)), {}),
    (aten.mul.Tensor, (on_meta(8, 4).t(), 2.0), {}),
    (aten.native_layer_norm.default, (on_meta(2, 8), [8], on_meta(8), None, 1e-5), {}),
    (aten.split_with_sizes_copy.default, (on_meta(4, 8), [1, 3]), {}),
    (aten._to_copy.default, (on_meta(4, 8),), {"dtype": torch.bfloat16}),
]


@pytest.mark.parametrize(("func", "args", "options"), CALLS, ids=lambda x: str(x)[:40] if callable(x) else "")
def test_results_are_those_of_torch_the_first_time_and_later(func, args, options):
    shapes, expected = Shapes(), facts(func(*args, **options))
    first, again = (shapes(func, args, options) for _ in range(2))
    assert facts(first) == facts(again) == expected
    for a, b in zip(*(x if isinstance(x, list | tuple) else [x] for x in (first, again)), strict=True):
        assert a is None or a.untyped_storage() is not b.untyped_storage(), "each has memory of its own"


def test_shapes_types_and_numbers_of_inputs_are_told_apart():
    shapes, x = Shapes(), on_meta(4, dtype=torch.int64)
    assert shapes(aten.mul.Tensor, (x, 1), {}).dtype == torch.int64
    assert shapes(aten.mul.Tensor, (x, 1.0), {}).dtype == torch.float32
    assert shapes(aten.mul.Tensor, (on_meta(5, dtype=torch.int64), 1), {}).shape == (5,)
    assert shapes(aten.sum.dim_IntList, (on_meta(4, 8), [0]), {}).shape == (8,)
    assert shapes(aten.sum.dim_IntList, (on_meta(4, 8), [1]), {}).shape == (4,)


def test_a_view_shares_memory_every_time():
    shapes, x = Shapes(), on_meta(4, 8)
    for _ in range(2):
        assert shapes(aten.view.default, (x, [8, 4]), {}).untyped_storage() is x.untyped_storage()
        assert shapes(aten._unsafe_view.default, (x, [32]), {}).untyped_storage() is x.untyped_storage()
