"""Run directories that are damaged, edited, foreign or out of date: one line from every stage that reads them.

Where a file is changed, its hash in the summary or in the checkpoint's record is made to fit again: hashes find what
changed by accident, the checks behind them what would still be wrong.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file

from rlhf.errors import UserError
from rlhf.evaluation import compare, score
from rlhf.files import sha256
from rlhf.rating.pairs import pair_answers
from rlhf.run.directory import StageRun
from rlhf.run.finished import verified
from tests.helpers import beside, content_of, one_line_of, run_stages, small
from tests.records import write_records

ROOT = Path("cpu-tiny/v1")
WEIGHTS, CONFIG = "adapter/adapter_model.safetensors", "adapter/adapter_config.json"


def copied(trained: Path, out: Path, *stages: str) -> Path:
    """A root of its own with copies of finished stages; returns `<out>/<recipe>/<version>`."""
    root = out / ROOT
    for name in ("data", *stages):
        shutil.copytree(trained / ROOT / name, root / name)
    return root


def rehash(stage: Path) -> None:
    """Make the summary name the result as it is now, and later stages the summary."""
    summary = json.loads((stage / "summary.json").read_text())
    summary["result_sha256"] = {name: sha256(stage / name) for name in summary["result_sha256"]}
    (stage / "summary.json").write_text(json.dumps(summary))
    for manifest in stage.parent.glob("*/manifest.json"):
        content = json.loads(manifest.read_text())
        if stage.name in content["parents"]:
            content["parents"][stage.name] = sha256(stage / "summary.json")
            manifest.write_text(json.dumps(content))


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(stage: Path) -> None:
        tensors = load_file(stage / WEIGHTS)
        change(tensors)
        save_file(tensors, stage / WEIGHTS, {"format": "pt"})

    return damage


def config(**keys: object) -> Callable[[Path], None]:
    def damage(stage: Path) -> None:
        content = json.loads((stage / CONFIG).read_text()) | keys
        (stage / CONFIG).write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))

    return damage


def first(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return tensors[sorted(tensors)[0]]


# -- adapters ----------------------------------------------------------------------------------------------------------

NAN = weights(lambda tensors: first(tensors).fill_(float("nan")))
INFINITE = weights(lambda tensors: first(tensors)[0].fill_(float("inf")))
GARBAGE = weights(lambda tensors: first(tensors).view(torch.uint8).fill_(0xFF))
DROPPED = weights(lambda tensors: tensors.pop(sorted(tensors)[0]))
EXTRA = weights(lambda tensors: tensors.update({"base_model.model.evil.lora_A.weight": torch.ones(2, 2)}))
SHAPE = weights(lambda tensors: tensors.update({sorted(tensors)[0]: torch.ones(3, 5)}))
HEAD = "base_model.model.score.weight"


def no_safetensors(stage: Path) -> None:
    (stage / WEIGHTS).write_bytes(b"\xff" * 100)


@pytest.mark.parametrize("stage", ["dpo"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(NAN, "holds NaN or infinity", id="sft-nan"),
        pytest.param(DROPPED, "lacks base_model.model.model.layers.0.mlp", id="sft-dropone"),
        pytest.param(EXTRA, "has an unknown weight base_model.model.evil.lora_A.weight", id="sft-extra"),
        pytest.param(SHAPE, "(has another shape of|cannot be read).*layers.0.mlp", id="sft-shape"),
        pytest.param(no_safetensors, "adapter_model.safetensors: cannot be read", id="sft-bytes"),
        pytest.param(config(peft_type="EVIL"), "adapter_config.json: peft_type: input should be 'LORA'", id="cfg-type"),
        pytest.param(config(r="x"), "adapter_config.json: r: input should be a valid integer", id="cfg-r"),
        pytest.param(config(use_dora=True), "adapter_config.json: use_dora: input should be False", id="cfg-dora"),
        pytest.param(lambda s: (s / CONFIG).write_text("{"), "adapter_config.json: cannot be read", id="cfg-cut"),
    ],
)
def test_a_policy_that_cannot_be_used_stops_the_stage_that_reads_it(trained, tmp_path, stage, damage, said):
    root = copied(trained, tmp_path, "pretrain", "sft")
    damage(root / "sft")
    rehash(root / "sft")
    with pytest.raises(UserError, match=said) as caught:
        run_stages(small(), tmp_path, stage)
    one_line_of(caught)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(
            weights(lambda w: [w.pop(k) for k in list(w) if k != HEAD]), "lacks base_model.*more", id="rm-tiny"
        ),
        pytest.param(weights(lambda w: w.pop(HEAD)), "lacks base_model.model.score.weight", id="rm-noscore"),
        pytest.param(
            weights(lambda w: w.update({HEAD: torch.ones(2, 7)})),
            r"has another shape of base_model.model.score.weight, \[2, 7\] for \[1, 32\]",
            id="rm-shape",
        ),
        pytest.param(EXTRA, "has an unknown weight base_model.model.evil.lora_A.weight", id="rm-extra"),
        pytest.param(
            weights(lambda w: w.update({"evil": torch.ones(1)})), "has an unknown weight evil", id="rm-extra-name"
        ),
        pytest.param(DROPPED, "lacks base_model", id="rm-dropone"),
        pytest.param(SHAPE, "has another shape of base_model", id="rm-lora-shape"),
        pytest.param(NAN, "holds NaN or infinity", id="rm-nan"),
    ],
)
def test_a_reward_model_that_cannot_be_used_stops_ppo(trained, tmp_path, damage, said):
    root = copied(trained, tmp_path, "pretrain", "sft", "rm")
    damage(root / "rm")
    rehash(root / "rm")
    with pytest.raises(UserError, match=said) as caught:
        run_stages(small(), tmp_path, "ppo")
    assert "rm/adapter" in one_line_of(caught)


def test_a_base_of_nan_stops_the_stage_that_reads_it(trained, tmp_path):
    root = copied(trained, tmp_path, "pretrain")
    file = root / "pretrain/model/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, file, {"format": "pt"})
    rehash(root / "pretrain")
    with pytest.raises(UserError, match=r"model\.norm\.weight holds NaN or infinity") as caught:
        run_stages(small(), tmp_path, "sft")
    one_line_of(caught)


# -- parents -----------------------------------------------------------------------------------------------------------


def made_anew(stage: Path) -> None:
    """Another run under the same name: other weights, a summary of its own."""
    weights_of = next(stage.glob("*/*.safetensors"))
    tensors = {name: tensor * 1.01 for name, tensor in load_file(weights_of).items()}
    save_file(tensors, weights_of, {"format": "pt"})
    summary = json.loads((stage / "summary.json").read_text())
    summary["result_sha256"] = {name: sha256(stage / name) for name in summary["result_sha256"]}
    (stage / "summary.json").write_text(json.dumps(summary))


def readers(out: Path) -> dict[str, Callable[[], object]]:
    return {
        "ppo": lambda: run_stages(small(), out, "ppo"),
        "evaluate": lambda: run_stages(small(), out, "evaluate"),
        "score": lambda: score.finished_stages(small(), out),
    }


@pytest.mark.parametrize("reader", ["ppo", "evaluate", "score"])
@pytest.mark.parametrize(
    ("anew", "said"),
    [
        pytest.param("pretrain", "(sft|rm) was made from another pretrain", id="par-base-stale"),
        pytest.param("sft", "rm was made from another sft", id="par-rm-stale"),
    ],
)
def test_a_parent_that_was_made_anew_does_not_go_with_what_was_made_from_it(trained, tmp_path, reader, anew, said):
    root = copied(trained, tmp_path, "pretrain", "sft", "rm")
    made_anew(root / anew)
    with pytest.raises(UserError, match=said) as caught:
        readers(tmp_path)[reader]()
    assert "run " in one_line_of(caught)


def test_a_parent_whose_manifest_names_no_parents_is_refused(trained, tmp_path):
    root = copied(trained, tmp_path, "pretrain", "sft")
    manifest = json.loads((root / "sft/manifest.json").read_text()) | {"parents": {}}
    (root / "sft/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"sft/manifest.json: .*pretrain"):
        run_stages(small(), tmp_path, "rm")


def test_a_stage_is_done_only_with_its_result(trained, tmp_path):
    root = copied(trained, tmp_path, "pretrain", "sft")
    assert StageRun(tmp_path, small(), "sft").done()
    (root / "sft/adapter/adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(UserError, match=r"adapter_model.bin does not belong to what sft has made; take it out"):
        StageRun(tmp_path, small(), "sft").done()
    (root / "sft/adapter/adapter_model.bin").unlink()
    weights(lambda tensors: first(tensors).mul_(2))(root / "sft")
    with pytest.raises(UserError, match=r"adapter_model.safetensors has changed since sft was done; move .*/sft away"):
        StageRun(tmp_path, small(), "sft").done()


def test_an_evaluation_is_verified_before_it_is_rated_or_compared(tmp_path):
    root = tmp_path / ROOT
    (root / "evaluate").mkdir(parents=True)
    answers = {"sft": {"response": "a"}, "ppo": {"response": "b"}}
    samples = root / "evaluate/samples.jsonl"
    samples.write_text(json.dumps({"step": 0, "prompt": "p", **answers}) + "\n")
    write_records(root / "evaluate")
    assert len(pair_answers(root).pairs) == 1
    samples.write_text(samples.read_text().replace('"b"', '"c"'))
    for reader in (lambda: pair_answers(root), lambda: compare.load(root, "ppo")):
        with pytest.raises(UserError, match=r"evaluate/samples.jsonl has changed since evaluate was done"):
            reader()


# -- generated data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_generated_data_that_was_changed_is_refused(trained, tmp_path, stage):
    """Rows toy-tampered and toy-tampered-sft: also where no parent has read it before."""
    root = copied(trained, tmp_path, *(["pretrain"] if stage == "sft" else []))
    file = root / "data" / data_folder(trained) / "pairs.jsonl"
    file.write_text(file.read_text().replace(" the ", " teh ", 1))
    with pytest.raises(UserError, match=r"pairs.jsonl has changed since it was made here; delete .*/toy-") as caught:
        run_stages(small(), tmp_path, stage)
    one_line_of(caught)


def data_folder(trained: Path) -> str:
    """The folder that the small recipe made; other tests leave data of other settings beside it."""
    files = json.loads((trained / ROOT / "pretrain/manifest.json").read_text())["data"]["files"]
    return Path(files[0]["name"]).parent.name


def test_generated_data_that_was_cut_off_is_made_again(trained, tmp_path):
    """Killed while it was written: there is no made.json yet."""
    beside(trained, tmp_path, "pretrain")
    (tmp_path / ROOT / "data").unlink()
    manifest = content_of(trained / ROOT / "pretrain/manifest.json")
    folder = data_folder(trained)
    (tmp_path / ROOT / "data" / folder).mkdir(parents=True)
    for name in ("corpus.jsonl", "pairs.jsonl"):
        whole = (trained / ROOT / "data" / folder / name).read_bytes()
        (tmp_path / ROOT / "data" / folder / name).write_bytes(whole[: len(whole) // 2])
    run_stages(small(), tmp_path, "sft")
    assert content_of(tmp_path / ROOT / "sft/manifest.json")["data"]["sha256"] == manifest["data"]["sha256"]


# -- runs that move ----------------------------------------------------------------------------------------------------


def test_a_run_that_was_moved_goes_on_and_peft_finds_its_base(trained, tmp_path):
    """Trained in one place, then moved: its stages are done there, later ones read them."""
    root = copied(trained, tmp_path, "pretrain", "sft", "rm")
    for stage in ("sft", "rm"):
        config(base_model_name_or_path="/where/it/was/pretrain/model")(root / stage)
    for stage in ("pretrain", "sft", "rm"):
        summary = run_stages(small(), tmp_path, stage)
        assert summary == content_of(trained / ROOT / stage / "summary.json")
    base = json.loads((root / "sft" / CONFIG).read_text())["base_model_name_or_path"]
    assert base == str((root / "pretrain/model").resolve())
    AutoPeftModelForCausalLM.from_pretrained(root / "sft/adapter")
    assert not any(Path(file["name"]).is_absolute() for file in content_of(root / "sft/manifest.json")["data"]["files"])
    assert run_stages(small(dpo__max_steps=1), tmp_path, "dpo")["status"] == "done"


@pytest.mark.parametrize("named", [None, "/root/of/somebody/else", "x" * 300])
def test_a_copy_names_its_own_base(trained, tmp_path, named):
    """None: that of the run it was copied from, which is still there and may be trained anew."""
    root = copied(trained, tmp_path, "pretrain", "sft")
    if named:
        config(base_model_name_or_path=named)(root / "sft")
    as_copied = (root / "sft" / CONFIG).read_bytes()
    assert StageRun(tmp_path, small(), "sft").done() and verified(root, "sft")
    assert (root / "sft" / CONFIG).read_bytes() == as_copied, "a check writes nothing"
    run_stages(small(), tmp_path, "sft")
    base = json.loads((root / "sft" / CONFIG).read_text())["base_model_name_or_path"]
    assert base == str((root / "pretrain/model").resolve())
    before = (root / "sft" / CONFIG).read_bytes()
    run_stages(small(), tmp_path, "sft")
    assert (root / "sft" / CONFIG).read_bytes() == before
