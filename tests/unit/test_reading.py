"""What a reader of PPO has to open: the lines that importing it reads, imports inside of functions counted too."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = 9_000  # of all files below rlhf/


def file_of(name: str) -> Path | None:
    base = ROOT / name.replace(".", "/")
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            yield from (f"{module}.{alias.name}" if module else alias.name for alias in node.names)
            yield module or ""


def test_importing_ppo_reads_few_lines():
    read, waiting = {"": 0}, ["rlhf.stages.ppo"]
    while waiting:
        name = waiting.pop()
        if name not in read and name.partition(".")[0] == "rlhf":
            file = file_of(name)
            read[name] = 0 if file is None else len(file.read_text(encoding="utf-8").splitlines())
            waiting += [name.rpartition(".")[0], *(() if file is None else imported(file))]
    assert sum(read.values()) <= LINES, sorted(read.items(), key=lambda each: -each[1])[:40]
