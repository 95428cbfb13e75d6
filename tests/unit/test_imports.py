"""Imports point down: a part of rlhf knows itself and the parts below it."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = (
    *(("__main__",), ("cli",), ("report", "new"), ("rating",), ("plan",), ("stages",), ("evaluation",), ("rollout",)),
    *(("models",), ("data",), ("process", "observe"), ("run",), ("recipe",)),
    *(("packages",), ("files",), ("terminal", "objectives", "stats"), ("errors",)),
)
LEVEL = {part: height for height, layer in enumerate(LAYERS) for part in layer}
RUN_DIRECTORY = {"directory", "parents", "finished", "checkpoints", "logs", "outcomes", "named", "comparisons"}


def imports(file: Path) -> set[str]:
    """Dotted names of what a file imports, at any depth of its code."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {f"{n.module}.{a.name}" for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}


def test_imports_point_down():
    wrong = []
    for file in sorted((ROOT / "rlhf").rglob("*.py")):
        part = file.relative_to(ROOT / "rlhf").parts[0].removesuffix(".py")
        for package, below, *name in (imported.split(".") for imported in imports(file) if "." in imported):
            if package == "rlhf" and part != "__init__" and below != part and LEVEL.get(below, 99) <= LEVEL[part]:
                wrong.append(f"{file} imports {below}, which is not below it")
            knows = part == "models" or (part == "data" and name[:1] and name[0] in RUN_DIRECTORY)
            if package == "rlhf" and below == "run" and knows:
                wrong.append(f"{file} imports {below}.{name[0]}: models and data need no run directory")
    wrong += [f"{file} imports rlhf" for file in (ROOT / "peakmem").rglob("*.py") if "rlhf" in str(imports(file))]
    assert not wrong, "\n".join(wrong)


def test_a_command_line_starts_without_torch():
    code = "import sys, rlhf.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
