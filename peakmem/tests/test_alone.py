"""The package needs torch alone."""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import peakmem

PACKAGE = Path(peakmem.__file__).parent
MODULES = [*PACKAGE.glob("*.py"), *PACKAGE.glob("patches/*.py")]
OTHERS = ("rlhf", "bench", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "numpy", "pydantic")


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The packages that these nodes of a module import."""
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def test_nothing_but_torch_and_python_is_imported():
    """Another library in its own module under patches/ alone, and there inside a function."""
    known = {*sys.stdlib_module_names, "torch", "peakmem"}
    for file in MODULES:
        everywhere = list(ast.walk(ast.parse(file.read_text())))
        in_functions = [inner for node in everywhere if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)]
        own = {file.stem} if file.parent.name == "patches" else set()
        assert imported(everywhere) <= known | own, file
        assert imported(set(everywhere) - set(in_functions)) <= known, file


def test_a_training_step_is_followed_where_nothing_else_can_be_imported():
    """A process in which every import of another library fails, also one that torch would make if it could."""
    code = f"""
import sys
sys.modules |= dict.fromkeys({OTHERS!r})
import importlib.metadata, importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {OTHERS!r} else find(name, *rest)
import torch
from torch.profiler import record_function
from peakmem import StandIn, cards, deepen, highest_at_depth, replay

def run(layers):
    with StandIn("cuda", ("forward", "backward", "optimizer"), 1000, cards.CARDS["4090"].gpu) as followed:
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device="meta") for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            with record_function("forward"):
                loss = model(torch.ones(8, 64, device="meta")).sum()
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    return followed

two, four = run(2), run(4)
deep = deepen(two.events(), four.events(), 12)
assert [e.bytes for e in deep.events] == [e.bytes for e in run(12).events()]
whole = replay(deep.events, False, cards.workspace(cards.CARDS["4090"].gpu))[""]
highest = highest_at_depth(deep, 12, four.components())
assert sum(highest[""].values()) > sum(four.peaks()[""].highest.values())
assert whole.reserved >= whole.allocated > 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
