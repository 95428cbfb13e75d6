"""The comparison with peers: what both sides get is the same; ratios, turns, what does not fit; environments."""

import importlib
import json
import mmap
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from bench.kinds import PeerRecord, Spread, StageSteps
from bench.peer import __main__ as peer
from bench.peer import environments, figures, inputs, methods, training, trl_stages
from bench.reading import read
from rlhf import recipe
from rlhf.data.load import divide_rows
from rlhf.data.source import read_source
from rlhf.data.tokenize import DialogueTokenizer, words
from rlhf.errors import UserError
from rlhf.recipe.schema import Dialogues, Rm, Sft
from rlhf.recipe.schema_online import GroupOptions, Grpo, Ppo
from rlhf.run.directory import StageRun
from tests.helpers import noted

RECIPES = Path(__file__).parents[2] / "recipes"
RECORDS = Path(__file__).parents[2] / "results/peers"
SUMS, TOY = RECIPES / "cpu-smollm2-sums/v1", RECIPES / "cpu-tiny/v2"


def ran(tokens: float | None, seconds: float, peak: int = 100) -> StageSteps:
    """A run of a contender."""
    spread: Spread = {"median": seconds, "low": seconds, "high": seconds, "n": 4}
    row: StageSteps = {"clock": "cpu", "step_seconds": spread, "phase_peak_bytes": {"train": peak, "load": 10**9}}
    return row if tokens is None else {**row, "tokens_per_second": tokens}


# ---- figures ----


def test_a_ratio_is_of_tokens_per_second_with_the_range_over_the_rounds():
    sides = {
        "ours": [ran(400.0, 2.0, 400), ran(600.0, 1.0, 600), ran(500.0, 3.0, 500)],
        "trl": [ran(200.0, 5.0, 200), ran(250.0, 5.0, 250), ran(300.0, 5.0, 300)],
        "trl, tuned": [ran(500.0, 4.0, 500)] * 3,
    }
    beside = figures.side_by_side(sides, ["ours"], ["trl", "trl, tuned"])
    ours = beside["ours"]
    assert (ours["times_faster"], ours["times_faster_tuned"]) == (2.0, 1.0)
    assert ours["times_faster_range"] == pytest.approx([5 / 3, 2.4])
    assert ours["times_faster_tuned_range"] == [0.8, 1.2]
    assert (ours["step_seconds"], ours["step_seconds_range"], ours["memory_ratio"]) == (2.0, [1.0, 3.0], 2.0)
    assert ours["memory_ratio_range"] == pytest.approx([5 / 3, 2.4]) and ours["memory_ratio_tuned"] == 1.0
    assert "1.00 (0.80 to 1.20)" in figures._row("sft", "ours", ours)
    assert "times_faster" not in beside["trl"]


def test_steps_are_compared_where_a_peer_counts_no_tokens():
    sides = {"ours": [ran(400.0, 2.0)], "ours, lean": [ran(400.0, 1.0)], "a": [ran(None, 5.0)], "b": [ran(None, 4.0)]}
    beside = figures.side_by_side(sides, ["ours", "ours, lean"], ["a", "b"])
    assert (beside["ours"]["times_faster"], beside["ours"]["times_faster_tuned"]) == (2.5, 2.0)
    assert beside["ours, lean"]["times_faster"] == 5.0


def test_a_contender_that_does_not_fit_is_a_row_without_ratios():
    sides: dict[str, list[StageSteps]] = {
        "ours": [ran(1.0, 1.0)],
        "a": [ran(1.0, 1.0), {"out_of_memory": True}],
        "b": [ran(1.0, 2.0)],
    }
    beside = figures.side_by_side(sides, ["ours"], ["a", "b"])
    assert beside["a"] == {"out_of_memory": True} and figures._row("ppo", "a", beside["a"])[2] == "out of memory"
    assert "times_faster" not in beside["ours"] and beside["ours"]["times_faster_tuned"] == 1.0


def test_a_peak_on_a_cpu_is_that_of_the_process():
    assert figures._peak({"phase_peak_bytes": None, "peak_rss_bytes": 7}) == 7
    gpu: StageSteps = {"phase_peak_bytes": {"train": 5, "load": 9}, "peak_rss_bytes": 7}
    assert figures._peak(gpu) == 5


def test_older_records_of_a_contender_that_did_not_fit_are_shown():
    record = read(max((RECORDS / "trl-1.12-ppo").glob("cpu_*.json")), PeerRecord)
    record["figures"] = {name: {"out_of_memory": True} for name in record["figures"]}
    assert "| TRL, value model through LoRA | out of memory |" in figures.markdown(record)


# ---- runs ----


def test_contenders_take_turns_in_both_orders_and_peers_have_the_rows_of_our_first_run(monkeypatch, tmp_path):
    done: list[str] = []
    asked: list[Any] = []

    def measured(short: Any, stages: tuple[str], out: Path, **_: object) -> dict[str, StageSteps]:
        return noted(done, out.name, {stages[0]: ran(1.0, 1.0)})

    def call(command: list[str]) -> str:
        asked.append(json.loads(command[-1]))
        name = "tuned" if asked[-1]["settings"] else "trl"
        return noted(done, name, json.dumps({"wall": [9.0], "cpu": [1.0, 3.0], "tokens": 8, "peak": 5}))

    monkeypatch.setattr("bench.steps.measure_short", measured)
    monkeypatch.setattr(peer, "call", call)
    found = peer.Comparison(recipe.load(TOY), "sft", tmp_path, 2).run(3)
    there, back = ["ours", "trl", "tuned"], ["tuned", "trl", "ours"]
    assert done == there + back + there
    assert {(said["out"], said["warm_up"]) for said in asked} == {(str(tmp_path / "ours"), 2)}
    assert (found["trl"]["step_seconds"], found["trl"]["tokens_per_second"], found["trl"]["peak_bytes"]) == (
        2.0,
        2.0,
        5,
    )


@pytest.mark.parametrize(
    ("code", "said", "fits"),
    [
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", False),
        (0, "CUDA out of memory; a smaller batch is tried", True),
    ],
)
def test_what_does_not_fit_says_so_in_torch_s_words(code, said, fits):
    command = [sys.executable, "-c", f"import sys; print({said!r}, file=sys.stderr); sys.exit({code})"]
    assert peer.call(command) == ("" if fits else None)
    with pytest.raises(UserError, match="ended with 3: its reason"):
        peer.call([sys.executable, "-c", "import sys; print('its reason', file=sys.stderr); sys.exit(3)"])


def test_a_peer_of_another_environment_reads_files_that_are_written_once(monkeypatch, tmp_path):
    commands: list[list[str]] = []

    def call(command: list[str]) -> str:
        if "bench.peer.inputs" in command:
            (tmp_path / "files").mkdir()
        return noted(commands, command, '{"wall": [1.0], "cpu": [1.0], "tokens": null, "peak": 5}')

    monkeypatch.setattr(peer, "call", call)
    monkeypatch.setattr(peer, "python_of", Path)
    comparison = peer.Comparison(recipe.load(TOY), "ppo", tmp_path, 1)
    peers = [*comparison.method.theirs.values(), *comparison.method.beside.values()]
    assert [comparison.peer(other).get("tokens_per_second") for other in peers] == [None] * 3
    assert [command[0] for command in commands] == [sys.executable, "trl 1.12", "trl 1.12", "torchtune"]
    assert all(Path(command[1]).is_file() for command in commands[1:])


def test_every_contender_is_a_change_that_its_stage_takes():
    loaded = recipe.load(inputs.PEER_RECIPE)
    for stage, method in methods.METHODS.items():
        assert next(iter(method.ours)) == "ours" and method.ours["ours"] == {} and len(method.theirs) == 2
        for changes in method.ours.values():
            assert loaded.with_changes(changes).recipe.section(stage)
        for other in (*method.theirs.values(), *method.beside.values()):
            assert Path(peer.__file__).with_name(other.script).is_file(), stage


def test_the_peers_environment_is_made_once_with_our_versions(tmp_path, monkeypatch):
    commands = []

    def run(command, **options):
        commands.append([str(part) for part in command])
        return type("Done", (), {"returncode": 0})()

    def create(folder: Path, **options):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/python").touch()

    monkeypatch.setattr("bench.peer.environments.subprocess.run", run)
    monkeypatch.setattr("bench.peer.environments.venv.create", create)
    monkeypatch.setenv("PIP_ARGS", "--extra-index-url 'a place'")
    environments.peer_python(tmp_path / "env")
    (install,) = commands
    assert install[:4] == [str(tmp_path / "env/bin/python"), "-m", "pip", "install"]
    assert ["--extra-index-url", "a place", f"trl=={environments.TRL}"] == install[5:8]
    assert any(pin.startswith("torch==") and "+" not in pin for pin in install)
    environments.peer_python(tmp_path / "env")
    assert len(commands) == 2, "the second time it only looks whether TRL is there"
    assert f"version('trl').partition('+')[0] == '{environments.TRL}'" in commands[1][2]
    assert "version('torch').partition" in commands[1][2], "an upgrade of torch here makes it anew"


def test_a_record_names_the_packages_of_the_peer_s_environment():
    installed = environments.versions(Path(sys.executable))
    assert installed["torch"] == version("torch") and list(installed) == sorted(installed)


def test_a_folder_of_other_files_is_not_emptied(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds other files; name a new folder"):
        environments.peer_python(tmp_path)


# ---- what both sides get ----


def run_of(folder: Path, stage: Any, out: Path) -> StageRun:
    loaded = recipe.load(folder)
    return StageRun(out, loaded.with_changes(peer.few_real_steps(loaded.recipe, 3)), stage)


@pytest.fixture
def tokenizer() -> DialogueTokenizer:
    return DialogueTokenizer(words(2000), "hh")


def test_few_steps_change_no_setting_that_decides_a_step():
    before = recipe.load(SUMS)
    after = before.with_changes(peer.few_real_steps(before.recipe, 3)).recipe
    assert after.grpo and before.recipe.grpo and after.grpo.steps == after.grpo.eval_steps == 3
    around = {"steps", "eval_steps", "save_steps", "logging_steps", "max_eval_samples", "adapter"}
    assert after.grpo.model_dump(exclude=around) == before.recipe.grpo.model_dump(exclude=around)
    same = {"model", "data", "lora", "tokenizer", "hardware"}
    assert after.model_dump(include=same) == before.recipe.model_dump(include=same)


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo"])
def test_trl_gets_the_token_ids_on_which_our_stage_trains(stage, tmp_path, tokenizer):
    run = run_of(TOY, stage, tmp_path)
    rows = trl_stages.rows_of(run, tokenizer)
    corpus, _ = divide_rows(read_source(run.loaded.recipe, run.run_directory / "data"), run.loaded.recipe)
    options = run.loaded.recipe.section(stage)
    assert isinstance(options, Dialogues)
    if isinstance(options, Sft):
        first = corpus.demonstrations().train[0]
        ours = tokenizer.encode([(first.prompt, first.response)], options.max_prompt_length, options.max_length)[0][0]
        assert ours and rows[0]["input_ids"] == ours.prompt + ours.response
        assert rows[0]["labels"][len(ours.prompt) :] == ours.response and set(
            rows[0]["labels"][: len(ours.prompt)]
        ) == {-100}
    else:
        pair = corpus.preferences(stage).train[0]
        ours = tokenizer.encode([(pair.prompt, pair.rejected)], options.max_prompt_length, options.max_length)[0][0]
        assert ours
        prompt = [] if isinstance(options, Rm) else rows[0]["prompt_ids"]
        assert prompt + rows[0]["rejected_ids"] == ours.prompt + ours.response
    assert len(rows) <= (options.max_samples or len(rows))


@pytest.mark.parametrize(
    ("stage", "folder"), [("grpo", SUMS), ("grpo", inputs.PEER_RECIPE), ("rloo", inputs.PEER_RECIPE)]
)
def test_trl_has_the_recipe_s_settings_and_rewards(stage, folder):
    options = recipe.load(folder).recipe.section(stage)
    assert isinstance(options, GroupOptions)
    theirs = trl_stages.same_settings(options)
    same = trl_stages.SAME + (trl_stages.SAME_OF_GRPO if isinstance(options, Grpo) else ())
    assert theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"] == options.batch_size
    assert {name: theirs[name] for name in same} == {name: getattr(options, name) for name in same}
    assert trl_stages.rewards_of(options, stage)
    with pytest.raises(UserError, match="num_iterations and num_mini_batches must be 1"):
        trl_stages.same_settings(options.model_copy(update={"num_iterations": 2}))
    with pytest.raises(UserError, match="a reward model is not compared"):
        trl_stages.rewards_of(options.model_copy(update={"reward_funcs": ["model"]}), stage)


def test_a_reward_of_the_recipe_is_called_as_trl_calls_it():
    (reward,) = trl_stages.rewards_of(recipe.load(SUMS).recipe.options(Grpo), "grpo")
    assert reward(["?", "?"], ["12", "13"], [[1], [2]], answer=["12", "12"], trainer_state=None) == [1.0, 0.0]


@pytest.mark.parametrize("fits", [True, False])
def test_trl_reads_our_tokens_or_the_comparison_is_refused(fits, tmp_path, tokenizer):
    """A BOS that TRL's tokenizer leaves out stands in the text; of a prompt that is cut there is no such text."""
    run = run_of(SUMS, "grpo", tmp_path)
    options = run.loaded.recipe.options(Grpo).model_copy(update={"max_prompt_length": 512 if fits else 8})
    corpus, _ = divide_rows(read_source(run.loaded.recipe, run.run_directory / "data"), run.loaded.recipe)
    if not fits:
        with pytest.raises(UserError, match="TRL would read other prompts"):
            trl_stages.prompt_rows(tokenizer, corpus, options, "grpo")
        return
    rows = trl_stages.prompt_rows(tokenizer, corpus, options, "grpo")
    ids, _ = tokenizer.encode_prompts(corpus.prompts("grpo").train[: options.max_samples], 512)
    assert tokenizer.hf([row["prompt"] for row in rows])["input_ids"] == ids


def test_peers_of_ppo_read_base_prompts_and_settings_of_our_run(tmp_path):
    """From the made-up model: the same weights, the ids on which ours samples, and the ids of its tokenizer."""
    loaded = recipe.load(inputs.PEER_RECIPE)
    short = loaded.with_changes(inputs.make_model(tmp_path / "made", "tiny", loaded))
    asked: inputs.Asked = {
        "recipe": str(short.directory),
        "overrides": short.overrides,
        "stage": "ppo",
        "out": str(tmp_path / "ours"),
        "files": str(tmp_path / "files"),
        "settings": {},
        "warm_up": 1,
    }
    inputs.write_files(asked)
    made, given = (tmp_path / name / "base/model.safetensors" for name in ("made", "files"))
    assert made.stat().st_size == given.stat().st_size
    prompts = json.loads((tmp_path / "files/prompts.json").read_text())
    assert len(prompts) > 500 and {len(prompt) for prompt in prompts} == {*range(47, 80)}
    settings = read(tmp_path / "files" / inputs.SETTINGS, inputs.FileSettings)
    assert settings["tokens"] == {"pad": 0, "bos": 1, "eos": 2} and settings["threads"] == 1
    assert settings["lora"] == {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear"}


def test_both_peers_of_ppo_have_the_settings_of_the_recipe(tmp_path, monkeypatch):
    """The scripts import what their environments have; here a stand-in takes the values."""
    known = SimpleNamespace(PPOConfig=SimpleNamespace, PPOTrainer=None, OmegaConf=SimpleNamespace(create=dict))
    for name in ("trl.experimental.ppo", "torchtune", "omegaconf"):
        monkeypatch.setitem(sys.modules, name, known)
    trl_ppo, torchtune_ppo = (importlib.import_module(f"bench.peer.{name}") for name in ("trl_ppo", "torchtune_ppo"))
    options = recipe.load(inputs.PEER_RECIPE).recipe.options(Ppo)
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "options": options.model_dump(mode="json"),
        "tokens": {"pad": 0, "bos": 1, "eos": 2},
    }
    theirs = trl_ppo.configuration(settings)
    for key in trl_ppo.SAME:
        assert getattr(theirs, key) == getattr(options, key), key
    batch = options.batch_size
    assert (theirs.total_episodes, theirs.gradient_accumulation_steps) == (options.steps * batch, batch // 8)
    (tmp_path / "base").mkdir()
    sizes: dict[str, Any] = {**inputs.PEER_SIZES["tiny"]}
    (tmp_path / "base/config.json").write_text(LlamaConfig(**sizes).to_json_string(use_diff=False))
    second = torchtune_ppo.configuration(tmp_path, tmp_path, settings)
    assert (second["num_steps"], second["batch_size"]) == (options.steps * batch, batch)
    assert second["gradient_accumulation_steps"] == batch // 8
    assert (second["ppo_epochs"], second["max_generated_tokens"]) == (options.num_ppo_epochs, options.response_length)
    assert (second["gamma"], second["lmbda"], second["kl_coeff"]) == (options.gamma, options.lam, options.kl_coef)
    assert second["optimizer"]["lr"] == options.learning_rate
    assert (second["loss"]["epsilon"], second["loss"]["value_coeff"]) == (options.cliprange, options.vf_coef)


def test_steps_and_tokens_after_the_warm_up_and_the_peak_are_taken(monkeypatch):
    """Three steps of 1, 2 and 3 s; a block of 64 MiB that is freed before training ends is in the peak."""
    clock, now = training.StepClock(), iter([0.0, 1.0, 3.0, 6.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))

    class Trainer:
        def train(self):
            for tokens in (700, 900, 1000):  # of which the first step, with the longest rows, has most
                clock.on_step_end(None, SimpleNamespace(num_input_tokens_seen=tokens), None)
            with mmap.mmap(-1, 2**26) as block:  # new pages, which a tensor in memory that was freed before has not
                for page in range(0, 2**26, mmap.PAGESIZE):
                    block[page] = 1

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    taken = training.timed(Trainer(), clock, cuda=False, warm_up=1)
    assert taken["wall"] == [2.0, 3.0] and len(taken["cpu"]) == 2
    assert taken["tokens"] == 300, "tokens and seconds are of the same steps"
    assert 2**26 < taken["peak"] == training.resident_peak()
