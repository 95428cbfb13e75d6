"""What is left out before training, how rows are divided, and what the manifest says about it."""

import json
from typing import Any

import pytest

from rlhf.errors import UserError
from rlhf.run.directory import StageRun
from rlhf.stages.corpus import load_corpus
from tests.helpers import small


def row(n: int, chosen: str = "", rejected: str = "") -> dict[str, Any]:
    return {"prompt": f"Question {n}?", "chosen": chosen or f"It is {n}.", "rejected": rejected or f"It is not {n}."}


class Described(StageRun):
    """A run that keeps in memory what it would write into its manifest."""

    described: dict[str, Any]

    def describe(self, **facts: Any) -> None:
        self.described = facts


def corpus(tmp_path, rows, **changes):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = Described(tmp_path / "runs", small(data__source="files", data__files=[str(file)], **changes), "ppo")
    return load_corpus(run), run.described["data"]


def test_the_split_that_the_recipe_names_is_read(tmp_path, monkeypatch):
    import datasets  # slow to import, and only needed here

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for split, rows in (("train", 30), ("test", 20)):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(rows)))
    for chosen, rows in ((None, 30), ("test", 20)):
        data = {"source": "hub", "name": str(folder), "revision": "0" * 40, "split": chosen, "on_bad_row": "stop"}
        run = Described(tmp_path / "runs", small(data=data | {"heldout_fraction": 0.5}), "sft")
        load_corpus(run)
        assert run.described["data"]["pairs"] == rows


@pytest.mark.parametrize(
    ("stage", "expected", "said"),
    [
        ("sft", "", "sft: cpu-tiny v1, {train} rows for training and {test} held out, on cpu, into {path}"),
        ("ppo", "projected 2 hours", "ppo: cpu-tiny v1, {train} rows for training and {test} held out, on cpu, into "),
        ("pretrain", "", "pretrain: cpu-tiny v1, {texts} rows for training and"),
    ],
)
def test_a_stage_begins_with_recipe_rows_device_folder_and_time(tmp_path, capsys, stage, expected, said):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(50)))
    changes = {"data__source": "files", "data__files": [str(tmp_path / "rows.jsonl")]}
    run = Described(tmp_path / "runs", small(**changes), stage)
    run.expected = expected
    pairs = load_corpus(run).pairs
    first = capsys.readouterr().err.splitlines()[0]
    counts = {"train": len(pairs.train), "test": len(pairs.test), "texts": 2 * len(pairs.train)}
    assert first.startswith(said.format(**counts, path=run.path)) and first.endswith(expected or str(run.path))


def test_validation_rows_are_held_out_rows_of_other_conversations(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row(n)) + "\n" for n in range(400)))

    def parts(**changes):
        run = Described(tmp_path / "runs", small(data__source="files", data__files=[str(file)], **changes), "sft")
        return load_corpus(run)

    whole = parts(data__heldout_fraction=0.3)
    assert whole.pairs.validation == whole.pairs.test
    apart = parts(data__heldout_fraction=0.3, data__validation_fraction=0.1)
    assert apart.pairs.train == whole.pairs.train
    prompts = [{pair.prompt for pair in rows} for rows in (apart.pairs.test, apart.pairs.validation)]
    assert not prompts[0] & prompts[1] and prompts[0] | prompts[1] == {pair.prompt for pair in whole.pairs.test}
    assert 20 <= len(apart.pairs.validation) <= 60 <= len(apart.pairs.test)
    assert apart.prompts("ppo").validation == [pair.prompt for pair in apart.pairs.validation]
    assert len(apart.demonstrations().validation) == len(apart.pairs.validation)
    assert len(apart.pairs) == len(whole.pairs) == 400


def test_a_part_without_rows_is_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row(n)) + "\n" for n in range(20)))
    changes = {"data__heldout_fraction": 0.3, "data__validation_fraction": 1e-6}
    run = Described(tmp_path / "runs", small(data__source="files", data__files=[str(file)], **changes), "sft")
    with pytest.raises(UserError, match=r"no rows for validation; .*data.validation_fraction"):
        _ = load_corpus(run).preferences("rm").validation


def test_columns_of_prompts_are_found_by_name_and_must_agree(tmp_path):
    rows = [{"prompt": f"Question {n}?", "cases": [n], "id": n} for n in range(30)]
    found, _ = corpus(tmp_path, [*rows, rows[0] | {"id": 99}])
    cases = found.columns(["cases", "absent"])
    assert len(cases) == 30 and sorted(values["cases"][0] for values in cases.values()) == [*range(30)]
    with pytest.raises(UserError, match=r"rows\.jsonl:.*'id'"):
        found.columns(["id"])
