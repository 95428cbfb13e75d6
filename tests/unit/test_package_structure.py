"""Structure of the package: which part imports which, which commands start without torch, and the size of files."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import peakmem
from rlhf.recipe.stages import STAGE_TABLE, TRAINING_STAGES
from tests.conftest import LONGEST

ROOT = Path(__file__).parents[2]
# A part of the package may import itself and the parts below it, not those beside it or above.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("report", "new"),
    ("rating",),
    ("plan",),
    ("stages",),
    ("evaluation",),
    ("rollout",),
    ("models",),
    ("data",),
    ("process", "observe"),
    ("run",),
    ("recipe",),
    ("files", "terminal", "objectives", "stats"),
    ("errors",),
)


def modules(file: Path) -> set[str]:
    """Dotted name of everything of rlhf that a file imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports name the whole path"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.startswith("rlhf.")}


def imports(file: Path) -> set[str]:
    """First part of every `rlhf.<part>` that a file imports."""
    return {name.split(".")[1] for name in modules(file)}


def part(file: Path) -> str:
    return file.relative_to(ROOT / "rlhf").parts[0].removesuffix(".py")


FILES = [file for file in sorted((ROOT / "rlhf").rglob("*.py")) if part(file) != "__init__"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_down(file):
    level = {name: height for height, layer in enumerate(LAYERS) for name in layer}
    assert part(file) in level, "a new part of the package: give it a place in LAYERS"
    for name in imports(file) & level.keys() - {part(file)}:
        assert level[name] > level[part(file)], f"{file.name} imports {name}, which is not below it"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/code.md"])
def test_the_pages_give_the_order_of_imports(page):
    order = " → ".join(", ".join(layer) for layer in LAYERS if layer != ("__main__",))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", (ROOT / page).read_text())
    assert order in " ".join(text.split())


def test_what_needs_no_model_starts_without_torch(tmp_path):
    """One process runs all of them; none ends with a mistake in the command."""
    (tmp_path / "rows.jsonl").write_text('{"instruction": "Add 2 and 3.", "output": "5"}\n')
    for name in ("runs", "runs-a", "runs-b"):
        (tmp_path / name).mkdir()
    lines = [
        *("recipes", "data check rows.jsonl", "data show rows.jsonl", "run ppo --hw cpu", "ab --hw cpu --summary"),
        *("ratings export runs --to rated.jsonl", "compare runs-a runs-b", "--paths run ppo --hw 4090"),
    ]
    code = "import sys; from rlhf import cli\n"
    code += f"for line in {lines!r}:\n    sys.argv = ['rlhf', *line.split()]\n"
    code += "    try: cli.main()\n    except SystemExit as end: assert end.code != 2, (line, end)\n"
    code += "    assert 'torch' not in sys.modules, line"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})


def test_a_stage_imports_no_other_stage():
    """Stages share run directories; code that several of them need has a module of its own."""
    stages = {file.stem for file in (ROOT / "rlhf/stages").glob("*.py") if "def run_stage(" in file.read_text()}
    assert {row.module or stage for stage, row in STAGE_TABLE.items()} == stages
    for file in (ROOT / "rlhf/stages").rglob("*.py"):
        imported = {name.split(".")[2] for name in modules(file) if name.startswith("rlhf.stages.")}
        assert not stages & imported - {file.stem}, file


def reached(start: str) -> set[str]:
    """Modules of the package that importing one needs, itself too."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        file = (ROOT / name.replace(".", "/")).with_suffix(".py")
        if name not in found and file.is_file():
            found.add(name)
            waiting += {part for imported in modules(file) for part in (imported, imported.rpartition(".")[0])}
    return found


@pytest.mark.parametrize("stage", TRAINING_STAGES)
def test_a_stage_that_trains_is_given_its_rows_and_imports_no_reader(stage):
    """Who reads it meets the types of rows, and none of the modules that read files and find flaws."""
    found = reached(f"rlhf.stages.{STAGE_TABLE[stage].module or stage}")
    assert "rlhf.data.corpus" in found
    assert not {"rlhf.data.formats", "rlhf.data.source", "rlhf.data.quality.flaws"} & found


def test_models_and_data_need_no_run_directory():
    """A program may load a base and read rows by themselves: `BaseSpec`, `read_corpus`."""
    of_runs = {"directory", "parents", "finished", "checkpoints", "logs", "outcomes", "named", "comparisons"}
    for file in FILES:
        if part(file) in ("models", "data"):
            assert not of_runs & {name.split(".")[2] for name in modules(file) if name.startswith("rlhf.run.")}, file


def test_predictions_start_rehearsals_in_another_process():
    """An answer of rlhf.plan imports no rehearsal, and a rehearsal no answer."""
    allowed = {"plan": r"(?!rehearsal)", "rehearsal": r"(rehearsal|phases)"}
    for file in sorted((ROOT / "rlhf/plan").rglob("*.py")):
        imported = {name.split(".")[2] for name in modules(file) if name.startswith("rlhf.plan.")}
        assert [name for name in imported if not re.match(allowed[file.parent.name], name)] == [], file


def test_the_package_uses_ten_names_of_peakmem_and_the_trainer_none():
    """Plans, and what shows them: a trainer whose simulator breaks still trains."""
    used: set[str] = set()
    for file in FILES:
        names = re.findall(r"^\s*(?:from|import) +(peakmem\S*)(?: +import +(.+))?$", file.read_text(), re.M)
        assert not names or part(file) in ("cli", "report", "new", "rating", "plan"), file
        for module, imported in names:
            assert module == "peakmem" and imported, f"{file}: `from peakmem import NAME`"
            used |= set(imported.split(", "))
    assert used <= set(peakmem.__all__) and len(used) <= 10 >= len(peakmem.__all__)


def test_only_the_command_line_knows_click():
    """A module below cli takes values and raises UserError; options and their errors belong to cli."""
    for file in FILES:
        if part(file) != "cli":
            assert not re.search(r"^\s*(import|from) click\b", file.read_text(), re.M), file


def test_no_process_of_the_product_imports_from_the_current_folder():
    """There a user's `datasets.py` would be taken for the library: `python -m` looks there first, but not with -P."""
    for file in FILES:
        assert not re.search(r'executable,\s*"-m"', file.read_text()), f"{file}: needs -P"


def test_nothing_of_the_product_imports_a_study():
    for file in [*(ROOT / "rlhf").rglob("*.py"), *(ROOT / "bench").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        assert not re.search(r"^\s*(import|from) studies\b", file.read_text(), re.M), file


def test_the_package_has_fewer_than_twenty_parts():
    parts = {path.name for path in (ROOT / "rlhf").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert len(parts - {"__init__.py", "__main__.py"}) < 20, parts


def test_no_file_of_the_package_is_longer_than_450_lines():
    for file in FILES:
        assert len(file.read_text().splitlines()) <= 450, file


def test_no_test_module_imports_another():
    """What several of them need is in a conftest.py or in a module without tests."""
    for file in (ROOT / "tests").rglob("*.py"):
        imported = re.findall(r"^\s*(?:from|import) (.+)", file.read_text(), re.M)
        assert not [line for line in imported if re.search(r"\btest_", line)], file


def test_the_longest_files_of_the_suite_are_there():
    names = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
    assert set(LONGEST) <= names


def constants(tree: ast.Module) -> set[str]:
    """Upper-case names that a module gives a value to."""
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper()}


def test_a_constant_that_other_modules_import_has_a_name_of_its_own():
    """A reader who meets the name elsewhere then knows what it is."""
    trees = {file: ast.parse(file.read_text()) for part in ("rlhf", "bench") for file in (ROOT / part).rglob("*.py")}
    imported = {
        alias.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    places: dict[str, list[str]] = {}
    for file, tree in trees.items():
        for name in constants(tree) & imported:
            places.setdefault(name, []).append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


@pytest.mark.parametrize("package", ["rlhf", "bench", "studies"])
def test_an_init_file_holds_a_docstring_and_imports_at_most(package):
    for file in (ROOT / package).rglob("__init__.py"):
        for node in ast.parse(file.read_text()).body:
            names = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert text or isinstance(node, ast.ImportFrom) or names in (["__all__"], ["__version__"]), file


def test_a_peak_consists_of_the_same_components_for_recipes_and_for_the_simulator():
    """Neither of the two imports the other, so that the list stands twice."""
    from peakmem import events
    from rlhf.recipe import choices

    assert events.COMPONENTS == choices.COMPONENTS
