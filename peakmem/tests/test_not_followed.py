"""What a program may do that the stand-in cannot follow is refused, and what it takes for true is listed."""

import shutil
import subprocess
import sys
import sysconfig
import textwrap
from typing import NoReturn
from unittest import mock

import pytest
import torch
from torch import nn

from peakmem import cards
from peakmem.script import Followed, Record, to_the_end
from peakmem.stacks import Stack

START = """
import torch
from torch import nn

@torch.library.custom_op("peakmem_test::sizeless", mutates_args=())
def sizeless(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

@torch.library.custom_op("peakmem_test::sized", mutates_args=())
def sized(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

sized.register_fake(torch.empty_like)
net = nn.Conv2d(2, 2, 3).cuda()
x = torch.randn(2, 2, 8, 8, device="cuda")
known = torch.arange(4, device="cuda")
"""


CARD = cards.named("4090")


class Ended(BaseException):
    """The run has ended."""


def keep(record: Record) -> NoReturn:
    raise Ended(record)


def recorded(run: Followed, text: str, name: str = "train.py", **names: object) -> Record:
    """What is recorded of a program with this text."""
    with pytest.raises(Ended) as ended, run:
        to_the_end(run, lambda: exec(compile(text, name, "exec"), {"__name__": "__main__", **names}))
    (record,) = ended.value.args
    assert isinstance(record, Record)
    return record


def followed(lines: str) -> Record:
    """What is recorded of a program with these lines after those above; they begin in line 100."""
    text = START + "\n" * (99 - START.count("\n")) + lines
    return recorded(Followed(CARD, 2, None, 0, False, keep), text)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("if x.sum() > 2: pass", "the program branches on a value that only real numbers decide"),
        (
            "while not torch.allclose(x, x + 1): pass",
            "aten.allclose.default has no known size or result without real numbers",
        ),
        ("torch.compile(mode='max-autotune')(lambda y: y)(x)", "torch.compile with max-autotune captures CUDA graphs"),
        ("torch.distributed.init_process_group('nccl')", "several processes (torch.distributed) is not followed"),
        ("torch.multiprocessing.spawn(print, nprocs=1)", "several processes (torch.multiprocessing) is not followed"),
        ("torch.cuda.CUDAGraph()", "torch.cuda.CUDAGraph is not followed"),
        ("nn.LazyLinear(4)", "a lazy module, whose weights have no shape, is not followed"),
        ("torch.cuda.memory._dump_snapshot('x')", "torch.cuda.memory._dump_snapshot is not followed"),
        ("sizeless(x)", "peakmem_test.sizeless.default has no known size or result without real numbers"),
        ("import numpy; numpy.from_dlpack(x)", "native code gets a tensor's memory, which has no known size"),
        ("torch.utils.dlpack.to_dlpack(x)", "Cannot pack tensors on meta"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_line(lines, said):
    refused = followed(lines).refused
    assert refused is not None and refused.startswith(f"train.py:100: {said}")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("net(x)", "cuDNN's workspace is not counted"),
        ("sized(x)", "what peakmem_test.sized.default allocates inside its kernels is not counted"),
        ("x.sort()", "what CUB sorts in is not counted"),
        ("x.sum().item()", "a number that is not known is read as 1"),
        ("x.cpu()", "numbers that are not known are zeros on the host"),
        ("x[x > 0]", "a mask that is not known is read as all true"),
        ("x[x > 0] = x.sum()", "a mask that is not known is read as all true"),
        ("torch.equal(x, x + 1)", "two tensors are taken to be equal"),
        ("x.data_ptr()", "what is done with a tensor's address is not followed"),
        ("nn.Linear(2, 2).load_state_dict({})", "2 weights that the file lacks are loaded like the others"),
    ],
)
def test_what_is_taken_for_true_is_listed_with_its_line(lines, said):
    assert followed(lines).assumed == {f"train.py:100: {said}": 1}


@pytest.mark.parametrize(
    "lines", ["known[known > 1]", "known.cpu()", "known.sum().item()", "(x + 1).to(torch.bfloat16)", "x[known > 5]"]
)
def test_nothing_is_said_of_what_is_known(lines):
    record = followed(lines.replace("x[known", "x[0, 0, 0, :4][known"))
    assert not record.assumed and not record.refused


IDIOMS = """
# autocast again
ctx = torch.amp.autocast('cuda', dtype=torch.bfloat16)
for _ in range(2):
    with ctx, ctx: y = net(x)
assert y.dtype == torch.bfloat16
# a float mask of the host
mask = nn.Transformer.generate_square_subsequent_mask(8)
layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).cuda()
nn.TransformerEncoder(layer, 2)(x[0], mask=mask.cuda())
# a compiled model
m = torch.compile(net)
m.train()
m(x).sum().backward()
assert len(list(m.parameters())) == 2
# DataParallel
m = nn.DataParallel(net).cuda()
m(torch.randn(2, 2, 8, 8)).sum().backward()
# saving
import io
file = io.BytesIO()
torch.save(net.state_dict(), file)
file.seek(0)
net.load_state_dict(torch.load(file))
file.seek(0)
assert all(value.is_cuda for value in torch.load(file).values())
# a default device
torch.set_default_device('cuda')
assert torch.randn(2).is_cuda
torch.set_default_device('cpu')
assert not torch.randn(2).is_cuda
# tensors saved on the host
with torch.autograd.graph.save_on_cpu(pin_memory=True): y = net(x).sum()
y.backward()
# a distribution
from torch.distributions import Categorical
d = Categorical(logits=x[0, 0])
d.log_prob(d.sample()), d.entropy()
# a number in an f-string
assert f"{x.sum():.2f} {known.sum():d}" == "1.00 6"
"""
IDIOMS_BY_NAME = dict(part.split("\n", 1) for part in IDIOMS.strip().removeprefix("# ").split("\n# "))


@pytest.mark.parametrize("idiom", IDIOMS_BY_NAME)
def test_what_plain_programs_do_is_followed(idiom):
    record = followed(IDIOMS_BY_NAME[idiom])
    assert record.refused is None and record.crashed is None and record.ended == "its end"


def test_a_program_that_changes_its_weights_by_hand_has_steps_too():
    lines = "while True:\n    net(x).sum().backward()\n    for p in net.parameters(): p.data.add_(p.grad, alpha=-1)"
    record = followed(lines)
    assert record.steps == 2 and record.ended == "2 optimizer steps"


def test_what_an_operation_is_made_of_is_seen_without_autograd_too():
    """In inference mode torch hands over a cross entropy whole, whose log-softmax would not be seen."""
    lines = """
with torch.MODE():
    y = nn.functional.cross_entropy(torch.randn(64, 1000, device='cuda'), torch.ones(64, dtype=int, device='cuda'))
y.item()
"""
    records = [followed(lines.replace("MODE", mode)) for mode in ("no_grad", "inference_mode")]
    sizes = [[e.bytes for e in record.events if e.storage is not None] for record in records]
    assert sorted(sizes[0]) == sorted(sizes[1]) and sizes[0].count(256_000) == 2
    assert records[1].assumed == {"train.py:103: a number that is not known is read as 1": 1}


EXTENSION = """
#include <Python.h>
const char *linked = "libc10.so";
static PyObject *launch(PyObject *self, PyObject *x) { Py_RETURN_NONE; }
static PyMethodDef methods[] = {{"launch", launch, METH_O, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "kernels_of_mine", "", -1, methods};
PyMODINIT_FUNC PyInit_kernels_of_mine(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler")
def test_an_extension_that_works_on_tensors_is_refused_on_the_card_alone(tmp_path, monkeypatch):
    (tmp_path / "mine.c").write_text(EXTENSION)
    target = tmp_path / f"kernels_of_mine{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(["gcc", "-shared", "-fPIC", include, "-o", target, tmp_path / "mine.c"], check=True)
    monkeypatch.syspath_prepend(tmp_path)
    lines = "import kernels_of_mine as k; k.launch(torch.ones(1)); k.launch([x])"
    said = "kernels_of_mine.launch is native code, which has no known size"
    assert str(followed(lines).refused).endswith(said)


TRITON = {
    "triton/__init__.py": "",
    "triton/runtime/__init__.py": "",
    "triton/runtime/jit.py": "class JITFunction:\n    def run(self, *args, grid, warmup): raise OSError",
    "triton/runtime/autotuner.py": "class Autotuner:\n    def run(self, *args): raise OSError",
}


@pytest.mark.parametrize("forms", [1, 2])
def test_a_kernel_of_triton_allocates_nothing_but_what_choosing_its_form_takes(tmp_path, monkeypatch, forms):
    """Its result's numbers are not known; the buffer is that of triton.testing.do_bench, once a kernel."""
    for name, text in TRITON.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            del sys.modules[name]
        record = followed(f"""
from types import SimpleNamespace
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
tuner = Autotuner()
form = SimpleNamespace(all_kwargs=lambda: {{"BLOCK": 64}})
tuner.fn, tuner.configs, tuner.cache = JITFunction(), [form] * {forms}, {{}}
for _ in range(2):
    tuner.run(x, known, grid=(1,), warmup=False)
known.sum().item()
""")
    sizes = [event.bytes for event in record.events if event.bytes > 0]
    assert sizes.count(256 * 2**20) == (forms > 1)
    assert list(record.assumed.values()) == [1] and "is read as 1" in next(iter(record.assumed))


MADE = {
    "of a generator": "net = nn.ModuleList(nn.Linear(8, 8) for _ in range(N))",
    "of layers": "net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(N)])",
    "by growing": "net = nn.ModuleList()\nfor _ in range(N): net.append(nn.Linear(8, 8))",
}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("made", MADE)
def test_layers_that_a_shortened_model_lacks_leave_no_trace(made, device):
    """On the card, a layer that is made and thrown away would be an event that a deep model has not."""
    text = f"with torch.device('{device}'):\n{textwrap.indent(MADE[made], '    ')}\nnet.cuda()"
    events = []
    for short, built in ((Stack("Linear", 9), 9), (None, 3)):
        record = recorded(Followed(CARD, 2, short, 3, False, keep), text, nn=nn, torch=torch, N=built)
        events.append(sorted(event.bytes for event in record.events if event.storage is not None))
    assert events[0] == events[1] and len(events[0]) == 12, "allocated, and released at the end"


def test_rows_are_drawn_in_the_same_order_at_both_depths():
    """Fewer layers draw fewer numbers for their weights, before the order of rows is drawn."""
    text = (
        "for _ in range(layers): torch.randn(3)\ntorch.optim.SGD([torch.ones(1)])\norder += torch.randperm(9).tolist()"
    )
    for short, same in ((Stack("Linear", 9), True), (None, False)):
        orders: list[list[int]] = [[], []]
        for layers, order in zip((2, 4), orders, strict=True):
            torch.default_generator.manual_seed(1)
            recorded(Followed(CARD, 2, short, layers, False, keep), text, torch=torch, layers=layers, order=order)
        assert (orders[0] == orders[1]) == same, "a program that is run as it is draws as it does"
