"""A person's own files through the same stages: HH transcripts, instruction rows, preference rows, conversations."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.corpus import Corpus
from rlhf.data.rows import PromptOnly
from rlhf.errors import UserError
from rlhf.run.directory import StageRun
from rlhf.stages.corpus import load_corpus
from tests.helpers import TWO_STEPS, content_of, run_stages, small

WORDS = ["red", "green", "blue", "warm", "cold", "salt", "sugar", "stone", "river", "cloud", "small", "large"]
QUESTIONS = [f"What do you know about the {a} {b}?" for a in WORDS for b in WORDS if a != b][:80]


def answer(question: str, good: bool) -> str:
    subject = question.split("the ")[1].rstrip("?")
    return f"The {subject} is well known." if good else "No idea."


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return str(file)


def hh(folder: Path) -> list[str]:
    rows = [
        {side: f"\n\nHuman: {q}\n\nAssistant: {answer(q, side == 'chosen')}" for side in ("chosen", "rejected")}
        for q in QUESTIONS
    ]
    rows[3]["rejected"] = "\n\nHuman: Something else?\n\nAssistant: Yes."  # its prompt differs
    rows[5]["chosen"] = f"\n\nHuman: {QUESTIONS[5]}\n\nAssistant:"  # and this answer is missing
    return [write(folder / "hh.jsonl.gz", rows)]


def instructions_and_preferences(folder: Path) -> list[str]:
    instructions = [{"instruction": q, "input": "", "output": answer(q, True)} for q in QUESTIONS]
    pairs = [{"prompt": q, "chosen": answer(q, True), "rejected": answer(q, False)} for q in QUESTIONS[::-1]]
    return [write(folder / "instructions.jsonl", instructions), write(folder / "preferences.jsonl", pairs)]


def prompts(folder: Path, count: int = len(QUESTIONS)) -> str:
    rows = [{"prompt": f"{question} Tell me, please.", "id": f"row-{n}"} for n, question in enumerate(QUESTIONS)]
    return write(folder / "prompts.jsonl", rows[:count])


def conversations(folder: Path) -> list[str]:
    def says(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": text}

    rows = [
        {
            "prompt": [says("system", "Be brief."), says("user", "Hi"), says("assistant", "Hello"), says("user", q)],
            "chosen": [says("assistant", answer(q, True))],
            "rejected": [says("assistant", answer(q, False))],
        }
        for q in QUESTIONS
    ]
    for number, row in enumerate(rows):  # conversations that begin alike would all fall on one side of the split
        row["prompt"][1] = says("user", f"Hi, number {number} here")
    return [write(folder / "conversations.jsonl", rows)]


@pytest.mark.parametrize("make", [hh, instructions_and_preferences, conversations])
def test_own_files_run_through_the_whole_chain(tmp_path, make):
    loaded = small(data__source="files", data__files=make(tmp_path), data__heldout_fraction=0.2, **TWO_STEPS)
    summary = run_stages(loaded, tmp_path / "runs", "pretrain", "sft", "rm", "ppo", "dpo", "evaluate")
    assert summary["modified"]
    assert {"ppo/score", "dpo/kl_per_token"} <= set(summary["metrics"])
    assert not any("true_reward" in key for key in summary["metrics"])  # nobody knows the truth of real data
    root = tmp_path / "runs/cpu-tiny/v1"
    facts = {stage: content_of(root / stage / "manifest.json")["data"] for stage in ("pretrain", "sft", "ppo")}
    assert facts["pretrain"] == facts["sft"] == facts["ppo"]
    if make is hh:
        assert (facts["sft"]["pairs"], facts["sft"]["prompts_differ"], facts["sft"]["empty"]) == (78, 1, 1)


def test_instruction_rows_alone_are_enough_for_sft_and_not_for_a_reward_model(tmp_path):
    files = instructions_and_preferences(tmp_path)[:1]
    loaded = small(data__source="files", data__files=files, data__heldout_fraction=0.2)
    run_stages(loaded, tmp_path / "runs", "pretrain", "sft")
    with pytest.raises(UserError, match=r"rm needs preference pairs .*; the data has 0 for training and 0 held out"):
        run_stages(loaded, tmp_path / "runs", "rm")


def test_prompts_alone_feed_ppo_and_no_other_stage(tmp_path):
    files = [*instructions_and_preferences(tmp_path), prompts(tmp_path)]
    loaded = small(data__source="files", data__files=files, data__heldout_fraction=0.2)
    run = StageRun(tmp_path / "runs", loaded, "ppo")
    run.start(False, [], {"name": "cpu", "type": "cpu"})
    corpus = load_corpus(run)
    assert len(corpus.bare_prompts) == len(QUESTIONS) == content_of(run.path / "manifest.json")["data"]["prompts"]
    assert len(corpus.prompts("ppo")) == 2 * len(QUESTIONS)
    assert len(corpus.preferences("rm")) == len(corpus.demonstrations()) == len(QUESTIONS)
    assert not any("Tell me, please." in text for text in corpus.texts("hh").train)

    files = [prompts(tmp_path)]
    alone = small(data__source="files", data__files=files, data__heldout_fraction=0.2)
    with pytest.raises(UserError, match=r"^pretrain needs texts.*--data"):
        run_stages(alone, tmp_path / "alone", "pretrain")
    corpus = Corpus(corpus.rows.only(lambda row: isinstance(row, PromptOnly)))
    for stage, rows in (("sft", corpus.demonstrations), ("rm", lambda: corpus.preferences("rm"))):
        with pytest.raises(UserError, match=f"^{stage} needs .*--data"):
            rows()
    assert len(corpus.prompts("ppo")) == len(QUESTIONS)


@pytest.mark.skipif("RLHF_REAL_DATA" not in os.environ, reason="RLHF_REAL_DATA names no folder of real data files")
@pytest.mark.parametrize("names", [["hh-harmless-base.jsonl.gz"], ["instructions.jsonl", "preferences.jsonl"]])
def test_real_files_run_through_the_whole_chain(tmp_path, names):
    files = [str(Path(os.environ["RLHF_REAL_DATA"]) / name) for name in names]
    loaded = small(data__source="files", data__files=files)
    summary = run_stages(loaded, tmp_path / "runs", "pretrain", "sft", "rm", "ppo")
    assert summary["metrics"]["response_length"] > 0
