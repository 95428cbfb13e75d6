"""What the answer of a rehearsal is kept under: all that it depends on, and nothing else."""

import ast
import shutil
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path

import pytest

from peakmem import cards
from rlhf import recipe
from rlhf.plan import cache, machine
from rlhf.plan.cache import file_of
from rlhf.process.cuda import expandable_segments
from rlhf.run.packages import hash_of_modules
from tests.helpers import RECIPE, noted


@pytest.mark.parametrize(
    "package",
    [
        *("torch", "transformers", "trl", "peft"),
        "bitsandbytes",
    ],
)
def test_another_version_of_a_package_is_predicted_anew(monkeypatch, package):
    before = file_of(recipe.load(RECIPE), "sft")
    assert file_of(recipe.load(RECIPE), "sft") == before
    monkeypatch.setattr("rlhf.plan.cache.package_version", lambda name: "0" if name == package else version(name))
    assert file_of(recipe.load(RECIPE), "sft") != before


SECTIONS: dict[str, recipe.Changes] = {  # a change in each section
    "model": {"model.architecture.hidden_size": 32},
    "tokenizer": {"tokenizer.vocab_size": 700},
    "data": {"data.heldout_fraction": 0.2},
    "lora": {"lora.r": 3},
    "evaluate": {"evaluate.response_length": 9},
    "pretrain": {"pretrain.learning_rate": 1e-4},
    "sft": {"sft.max_eval_samples": 63},
    "rm": {"rm.max_eval_samples": 63},
    "ppo": {"ppo.response_length": 9},
    "dpo": {"dpo.max_eval_samples": 63},
    "merge": {"merge.stage": "sft"},
    "hardware": {"hardware.trunk": "lean"},
}

EVERYWHERE = {"model", "tokenizer", "data", "lora", "evaluate", "hardware"}

OWN: dict[recipe.StageName, set[str]] = {
    **{stage: {stage} for stage in ("sft", "rm", "ppo", "dpo")},
    "merge": {"merge", "sft"},
    "evaluate": {"rm"},
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_that_a_rehearsal_depends_on_is_predicted_anew_and_no_other(section, name):
    before, after = recipe.load(RECIPE), recipe.load(RECIPE, SECTIONS[section])
    assert before.recipe != after.recipe
    same = file_of(after, name) == file_of(before, name)
    assert same != (section in EVERYWHERE | OWN[name])


@pytest.mark.parametrize("key", ["hardware.name", "allocator"])
def test_card_and_allocator_decide_on_a_gpu_only(monkeypatch, key):
    cpu, cuda = recipe.load(RECIPE), recipe.load(RECIPE, {"hardware.device": "cuda"})
    before = [file_of(loaded, "sft") for loaded in (cpu, cuda)]
    if key == "allocator":
        monkeypatch.setattr("rlhf.plan.cache.expandable_segments", lambda: not expandable_segments())
        changed = [file_of(loaded, "sft") for loaded in (cpu, cuda)]
    else:
        named: recipe.Changes = {"hardware.name": "4090"}
        cpu, cuda = recipe.load(RECIPE, named), recipe.load(RECIPE, named | {"hardware.device": "cuda"})
        changed = [file_of(loaded, "sft") for loaded in (cpu, cuda)]
    assert [old == new for old, new in zip(before, changed, strict=True)] == [True, False]


def test_rehearsals_have_files_of_their_own():
    loaded = recipe.load(RECIPE)
    assert len({file_of(loaded, name) for name in OWN}) == len(OWN)


def test_another_code_of_a_module_has_another_hash(tmp_path):
    package = Path(cards.__file__).parent
    copied = shutil.copytree(package, tmp_path / "peakmem", ignore=shutil.ignore_patterns("__pycache__"))
    before = hash_of_modules(package)
    assert hash_of_modules(copied) == before
    modules = sorted(copied.rglob("*.py"))
    for module in (modules[0], modules[-1], copied / "patches" / "trl.py"):
        text = module.read_text()
        module.write_text(f"{text}\n")
        assert hash_of_modules(copied) != before, module
        module.write_text(text)
    without = hash_of_modules(copied, without=("patches",))
    (copied / "patches" / "trl.py").unlink()
    assert hash_of_modules(copied, without=("patches",)) == without != hash_of_modules(copied)
    modules[0].rename(modules[0].with_name(f"_{modules[0].name}"))
    assert hash_of_modules(copied, without=("patches",)) != without, "the same content under another name"


def test_another_code_of_what_is_rehearsed_is_predicted_anew(monkeypatch):
    """All that the process which rehearses may import, in a function too; no page of a report is among it."""
    seen: list[tuple[Path, Collection[str]]] = []
    monkeypatch.setattr(cache, "hash_of_modules", lambda package, without=(): noted(seen, (package, without), ""))
    monkeypatch.setattr(cache, "sha256", lambda file: noted(seen, (file, ()), ""))
    cache._code_hash.__wrapped__()

    def hashed(file: Path) -> bool:
        return any(
            file == place or (file.is_relative_to(place) and file.relative_to(place).parts[0] not in without)
            for place, without in seen
        )

    root = Path(recipe.__file__).parents[2]
    waiting, met = [root / "rlhf/plan/rehearsal/worker.py"], set()
    while waiting:
        file = waiting.pop()
        if file not in met:
            met.add(file)
            waiting += imported(file, root)
    assert len(met) > 100 and root / "rlhf/stages/ppo.py" in met and root / "peakmem/device.py" in met
    assert [file for file in met if not hashed(file)] == []
    assert not hashed(root / "rlhf/report/data.py") and not hashed(root / "rlhf/plan/projection.py")
    file = file_of(recipe.load(RECIPE), "sft")
    monkeypatch.setattr(cache, "_code_hash", lambda: "of other code")
    assert file_of(recipe.load(RECIPE), "sft") != file


def imported(file: Path, root: Path) -> list[Path]:
    """The modules of this project that a file imports; a stage is imported by its name."""
    names = {"rlhf.stages.ppo"} if file.name == "runner.py" else set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    places = [root / name.replace(".", "/") for name in names if name.split(".")[0] in ("rlhf", "peakmem")]
    return [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]


def test_seed_and_size_of_the_card_are_no_new_prediction():
    file = file_of(recipe.load(RECIPE), "sft")
    assert file_of(recipe.load(RECIPE, {"hardware.memory_gb": 9.0}, seed=5), "sft") == file
    assert file_of(recipe.load(RECIPE, {"hardware.device": "cuda"}), "sft") != file


def test_an_evaluation_of_other_policies_is_another_prediction():
    """It loads an adapter of each."""
    groups = RECIPE.parents[1] / "cpu-tiny-groups" / "v1"
    fewer = recipe.load(groups, {"grpo": None, "merge.stage": "ppo"})
    assert file_of(recipe.load(groups), "evaluate") != file_of(fewer, "evaluate")
    assert file_of(recipe.load(groups), "sft") == file_of(fewer, "sft")


@pytest.mark.parametrize("kept", ["a file", "of the system", "here"])
def test_rates_are_measured_once_also_where_nothing_can_be_kept(monkeypatch, tmp_path, capfd, kept):
    root = {"a file": tmp_path / "file", "of the system": Path("/proc/cache"), "here": tmp_path / "cache"}[kept]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    monkeypatch.setattr(cache, "_unwritten", {})
    measured: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        machine, "measure", lambda *sizes: noted(measured, sizes, cards.Rates(len(measured) + 1.0, 1.0, "here"))
    )
    wide, narrow = (recipe.load(RECIPE, {"model.architecture.hidden_size": width}).recipe for width in (64, 32))
    answers = [machine.rates(each).flops for each in (wide, narrow, wide, narrow)]
    assert answers == [1, 2, 1, 2]
    assert machine.rates(narrow, anew=True) == machine.rates(narrow) and len(measured) == 3
    said = capfd.readouterr().err.splitlines()
    assert len(said) == (kept != "here")
    assert all(f"{root}/rlhf: nothing can be kept there (N" in line and "XDG_CACHE_HOME" in line for line in said)
