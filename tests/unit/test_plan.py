"""`rlhf plan` and the preflight: what they print, and what they refuse."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.plan import cache, fit, plan
from rlhf.plan.cache import file_of
from rlhf.plan.machine import LIBRARIES
from rlhf.plan.phases import PredictedStage
from rlhf.plan.predict import Predictor, card_needed_bytes, predicted_stages
from rlhf.plan.preflight import require_fit
from rlhf.process.memory import CONTEXT_BYTES, Free
from rlhf.recipe import as_yaml
from rlhf.recipe.plain_yaml import Yaml
from rlhf.recipe.rehearsal import random_weights_changes
from rlhf.recipe.strict import with_overrides
from rlhf.terminal.wording import size_in_bytes
from tests.helpers import FIXTURES, RECIPE, rlhf
from tests.unit.plans import Known, global_batch, phase

TWO_PROCESSES = FIXTURES / "2xcpu-tiny" / "v1"
LENGTHS = {"max_length": 64, "max_prompt_length": 40, "max_eval_samples": 4, "max_samples": 64, "logging_steps": 1}
SIZES = {
    "model.architecture.hidden_size": 64,
    "model.architecture.intermediate_size": 192,
    "model.architecture.num_hidden_layers": 2,
    "hardware.threads": 1,
    "lora.r": 2,
    **{f"{stage}.{key}": value for stage in ("sft", "rm", "dpo") for key, value in LENGTHS.items()},
    "sft.per_device_train_batch_size": 4,
    "sft.gradient_accumulation_steps": 2,
    "rm.per_device_train_batch_size": 1,
    "dpo.per_device_train_batch_size": 4,
    "ppo.max_prompt_length": 40,
    "ppo.response_length": 8,
    "ppo.batch_size": 8,
    "ppo.per_device_train_batch_size": 4,
    "ppo.rollout_batch_size": 8,
    "ppo.max_eval_samples": 4,
    "evaluate.max_prompt_length": 40,
    "evaluate.response_length": 8,
    "evaluate.batch_size": 4,
    "evaluate.max_samples": 4,
}


def write_recipe(folder: Path, name: str, vocab: int = 2000, **changes) -> Path:
    """The CPU recipe at small sizes with random weights, as a recipe of its own."""
    base = recipe.load(RECIPE, {"model.architecture.vocab_size": vocab}).recipe
    overrides = random_weights_changes(base, 40, "hh") | SIZES
    overrides |= {key.replace("__", "."): value for key, value in changes.items()}
    content = with_overrides(yaml.load((RECIPE / "recipe.yaml").read_text(), Yaml), overrides)
    target = folder / name / "v1"
    target.mkdir(parents=True)
    (target / "recipe.yaml").write_text(yaml.safe_dump(content))
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="module")
def small(folder) -> Path:
    """For a CPU whose memory is not given."""
    return write_recipe(folder, "small")


@pytest.fixture(scope="module")
def narrow(folder) -> Path:
    """For a card of 2 GB, and larger than that. On a stand-in size costs nothing."""
    changes: dict[str, Any] = {"hardware__device": "cuda", "hardware__memory_gb": 2.0, "model__dtype": "bfloat16"}
    changes |= {"model__architecture__hidden_size": 4096, "model__architecture__intermediate_size": 16384}
    changes |= {"sft__per_device_train_batch_size": 32, "sft__gradient_accumulation_steps": 1}
    return write_recipe(folder, "narrow", **changes)


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory):
    """Predictions of this module: what one test has predicted, another one reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def predictor(cache_folder):
    """Each test has a predictor of its own, so that the commands of the next one find its process idle."""
    with Predictor() as made:
        yield made


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """`rlhf <arguments>` in an empty directory: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    return lambda *arguments: rlhf(monkeypatch, capsys, *arguments)


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_a_plan_as_json(command, predictor, small, tmp_path):
    for stage in predicted_stages(recipe.load(small).recipe):
        predictor.predict(recipe.load(small), stage)  # with this module's processes: the command then starts none
    code, out, _ = command("plan", "--recipe", small, "--json")
    made = json.loads(out)
    assert code == 0
    assert (made["recipe"], made["version"], made["modified"], made["hardware"]) == ("small", "v1", False, "cpu")
    assert list(made["stages"]) == ["sft", "rm", "ppo", "dpo", "evaluate", "merge"]
    for stage, row in made["stages"].items():
        assert {"peak_bytes", "card_needed_bytes", "fits", "in_memory_of", "phases"} <= set(row)
        assert "needed_bytes" not in row, "this is a phase's, of the allocator alone"
        assert row["fits"] is True
        assert row["peak_bytes"] == max(part["peak_bytes"] for part in row["phases"].values())
        for name, part in row["phases"].items():
            assert sum(part["components"].values()) == part["peak_bytes"] > 0, f"{stage}/{name}"
            outer = row["phases"].get(name.rpartition("/")[0])
            assert outer is None or outer["peak_bytes"] >= part["peak_bytes"]
    assert "train" in made["stages"]["sft"]["phases"]
    assert {"rollout", "rollout/prefill", "score", "update"} <= set(made["stages"]["ppo"]["phases"])
    assert not [*tmp_path.iterdir()], "nothing is written"


def test_a_plan_as_tables(command, small, tmp_path):
    code, out, _ = command("plan", "--recipe", small, "--stage", "sft")
    assert code == 0
    assert "sft" in out and "rollout" not in out
    code, out, _ = command("plan", "--recipe", small, "--stage", "ppo", "--phases")
    assert code == 0 and "rollout/prefill" in out
    code, out, _ = command("plan", "--recipe", small, "--stage", "sft", "--set", "sft.max_steps=9", "--json")
    assert json.loads(out)["modified"] is True
    assert not [*tmp_path.iterdir()]


def test_a_recipe_without_an_architecture_cannot_be_planned(command, folder):
    directory = write_recipe(folder, "unknown", model__source="local", model__name="x", model__architecture=None)
    content = yaml.safe_load((directory / "recipe.yaml").read_text())
    content["tokenizer"] = {"source": "local", "name": "x", "template": "hh"}
    content["data"] |= {"source": "files", "files": ["a.jsonl"]}
    (directory / "recipe.yaml").write_text(yaml.safe_dump(content))
    code, _, err = command("plan", "--recipe", directory)
    assert code == 1
    assert "memory is predicted from model.architecture, which this recipe does not have" in " ".join(err.split())


def test_more_memory_than_the_card_has_is_exit_code_1(command, predictor, narrow):
    """Gaps between blocks and the driver count; merging leaves the card alone."""
    loaded = recipe.load(narrow)
    made = plan.make_plan(predictor, loaded, ("sft", "merge"))
    row = made.stages["sft"]
    assert made.card_bytes == 2_000_000_000
    sizes = [(phase.peak_bytes, phase.needed_bytes or 0) for phase in row.phases.values()]
    assert row.card_needed_bytes == max(needed for _, needed in sizes) + CONTEXT_BYTES
    assert all(peak <= needed for peak, needed in sizes)
    assert row.fits is False
    assert (made.stages["merge"].fits, made.stages["merge"].in_memory_of) == (None, "host")
    code, out, err = command("plan", "--recipe", narrow, "--stage", "sft", "--json")
    assert (code, json.loads(out)["stages"]["sft"]) == (1, json.loads(json.dumps(asdict(made)))["stages"]["sft"])
    assert "--fit card" in err
    code, _, _ = command("plan", "--recipe", narrow, "--stage", "merge")
    assert code == 0


def test_what_fits_to_the_byte_fits(predictor, narrow):
    predicted = predictor.predict(recipe.load(narrow), "sft")
    need = card_needed_bytes(predicted.whole)
    for size, fits in ((need, True), (need - 1, False)):
        loaded = recipe.load(narrow, {"hardware.memory_gb": size / 1e9})
        assert plan.make_plan(Known(predicted), loaded, ("sft",)).stages["sft"].fits is fits


def test_without_bitsandbytes_four_bits_are_refused_by_name(command, folder, tmp_path_factory, monkeypatch):
    """In a process of its own that cannot find the package."""
    blocked = tmp_path_factory.mktemp("blocked")
    (blocked / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = classmethod(\n"
        "    lambda cls, name, *rest: None if name.split('.')[0] == 'bitsandbytes' else find(name, *rest))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(blocked))
    made = write_recipe(
        folder, "four-bits", model__quantization="nf4", hardware__device="cuda", model__dtype="bfloat16"
    )
    code, _, err = command("plan", "--recipe", made, "--stage", "sft")
    assert code == 1
    assert "pip install 'bitsandbytes" in " ".join(err.split())


# -- settings that fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "share"), [("sft", 1.0), ("sft", 0.6), ("ppo", 1.0)])
def test_settings_that_fit_do_fit_and_change_no_batch(command, predictor, small, stage, share):
    before = recipe.load(small)
    limit = round(share * predictor.predict(before, stage).whole.peak_bytes)
    fitting = fit.fit(predictor.predict, before, (stage,), limit)
    assert not fitting.too_large
    code, out, _ = command("plan", "--recipe", small, "--stage", stage, "--fit", f"{limit / 1e9:.9f}GB")
    assert code == 0 and all(f"--set {key}={as_yaml(value)}" in out for key, value in fitting.changes.items())
    loaded = recipe.load(small, fitting.changes)
    assert card_needed_bytes(predictor.predict(loaded, stage).whole) <= limit
    assert global_batch(loaded, stage) == global_batch(before, stage)
    assert loaded.recipe.model.quantization == "none"


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GB", 12_000_000_000), ("1.5 gb", 1_500_000_000), ("2GiB", 2 * 2**30)],
)
def test_a_size_is_read_with_its_unit(text, size):
    assert size_in_bytes(text) == size


# -- a CPU: what is free here is its card ------------------------------------------------------------------------------


def free_here(monkeypatch, size: int) -> None:
    monkeypatch.setattr("rlhf.process.memory.free", lambda: Free(size, "left of the container's limit"))


def test_a_stage_that_needs_more_than_is_free_is_refused(command, predictor, small, monkeypatch):
    """To the byte, with the libraries of each process, where the base is not small beyond doubt."""
    tensors = predictor.predict(recipe.load(small), "sft").whole.peak_bytes
    monkeypatch.setattr("rlhf.plan.preflight.SMALL", 10**9)
    free_here(monkeypatch, tensors + LIBRARIES)
    assert require_fit(predictor.predict, recipe.load(small), "sft") is None
    free_here(monkeypatch, tensors + LIBRARIES - 1)
    with pytest.raises(UserError, match=r"sft .*container's limit.*--no-preflight"):
        require_fit(predictor.predict, recipe.load(small), "sft")
    assert command("run", "sft", "--recipe", small)[0] == 1
    known = Known(PredictedStage(phase(1, base=10**9), {}))
    free_here(monkeypatch, 4 * 10**9 - 1)
    with pytest.raises(UserError, match=r"sft would need 4.00 GB"):
        require_fit(known.predict, recipe.load(TWO_PROCESSES), "sft")


# -- the preflight -----------------------------------------------------------------------------------------------------


def test_a_stage_that_does_not_fit_is_refused_before_it_loads(command, predictor, narrow, tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf.process.torch_setup.device_of", lambda recipe: torch.device("cpu"))
    with pytest.raises(UserError, match=r"sft .*nothing was started.*--fit card") as caught:
        require_fit(predictor.predict, recipe.load(narrow), "sft")
    assert command("run", "sft", "--recipe", narrow) == (1, "", f"error: {caught.value}\n")
    assert not [*tmp_path.rglob("sft/*")]
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_predicted_first(command, narrow):
    code, _, err = command("run", "sft", "--recipe", narrow)
    assert code == 1
    assert err.startswith("error: the recipe needs CUDA")


def test_what_fits_goes_on_with_its_predicted_peak(predictor, narrow):
    wide = recipe.load(narrow, {"hardware.memory_gb": 200.0})
    assert require_fit(predictor.predict, wide, "sft") == predictor.predict(wide, "sft").whole.peak_bytes


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_a_damaged_cache_is_predicted_anew(predictor, small):
    loaded = recipe.load(small)
    before = predictor.predict(loaded, "sft")
    file = file_of(loaded, "sft")
    assert file.is_file()
    answer = json.loads(file.read_text())
    for damage in (
        "{}",
        "nonsense",
        json.dumps(answer)[:-1],
        json.dumps([answer[0], {"train": [1]}]),
    ):
        file.write_text(damage)
        assert cache.read(file) is None, damage
    assert predictor.predict(loaded, "sft") == before
