"""One answer has one score, whatever computes it: stage, command, PPO, evaluation, plain transformers with peft."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf import stats
from rlhf.data.batch import collate
from rlhf.data.rows import Message
from rlhf.data.tokenize import Encoded
from rlhf.evaluation import score
from rlhf.evaluation.reward_model import scores_of
from rlhf.recipe import as_yaml
from rlhf.run.directory import StageRun
from tests.helpers import RECIPE, SMALL, beside, content_of, not_none, rlhf, run_stages, small
from tests.lines import read_intact_lines

PROMPT = (Message("user", "Name a colour."),)
ANSWERS = ["Red.", "  Red.", "Red. \n", "Red.\n\n", "A lemon is a kind of fruit. " * 20, ""]


@pytest.fixture(scope="module")
def model(trained) -> score.RewardModel:
    return score.RewardModel(StageRun(trained, small(), "evaluate"))


@pytest.fixture(scope="module")
def plain(trained) -> PeftModel:
    """The saved adapter in plain peft and transformers, which find the last real token themselves."""
    folder = trained / "cpu-tiny/v1"
    base = AutoModelForSequenceClassification.from_pretrained(folder / "pretrain/model", num_labels=1)
    return PeftModel.from_pretrained(base, folder / "rm/adapter").eval()


@torch.no_grad()
def plain_scores(plain: torch.nn.Module, rows: list[Encoded]) -> list[float]:
    return [plain(input_ids=torch.tensor([row.prompt + row.response])).logits.item() for row in rows]


def encoded(model: score.RewardModel, answers: list[str]) -> list[Encoded]:
    options = model.options
    rows, _ = model.tokenizer.encode(
        [(PROMPT, answer) for answer in answers], options.max_prompt_length, options.max_length
    )
    return [not_none(row) for row in rows]


def of_rollout(model: score.RewardModel, rows: list[Encoded]) -> list[float]:
    tokenizer = model.tokenizer
    rollout = collate([row.prompt for row in rows], [row.response for row in rows], tokenizer.pad_id, tokenizer.eos_id)
    scores: list[float] = model.shared.scores(rollout).tolist()
    return scores


def test_the_same_tokens_have_the_same_score(model, plain):
    """Answers that end, those that are cut, EOS alone, and white space at both ends."""
    eos, pad = model.tokenizer.eos_id, model.tokenizer.pad_id
    ended = encoded(model, ANSWERS)
    assert [row.response[-1] == eos for row in ended] == [True] * 4 + [False, True]
    cut = [Encoded(row.prompt, row.response[:-1]) for row in ended[:4]]  # as sampling cuts them
    rows = [*ended, *cut, Encoded(ended[0].prompt, [eos])]
    expected = plain_scores(plain, rows)
    assert len({round(number, 5) for number in expected}) > 5
    assert scores_of(rows, model.shared.scores_at, pad, 4).tolist() == pytest.approx(expected, abs=2e-5)
    assert of_rollout(model, rows) == pytest.approx(expected, abs=2e-5)


def test_a_cut_answer_may_end_with_the_padding_token(model, plain):
    """Places are counted here; plain transformers looks for the last token that is not padding: one place earlier."""
    (row,) = encoded(model, ["Red."])
    cut = Encoded(row.prompt, [*row.response[:-1], model.tokenizer.pad_id])
    counted = of_rollout(model, [cut])
    assert scores_of([cut], model.shared.scores_at, model.tokenizer.pad_id, 1).tolist() == pytest.approx(
        counted, abs=2e-5
    )
    assert plain_scores(plain, [cut]) != pytest.approx(counted, abs=2e-5)


@torch.no_grad()
def test_an_exported_reward_model_gives_the_same_scores_from_ids_and_from_messages(model, trained, tmp_path, plain):
    """It is a plain classifier of transformers; its tokenizer's chat template writes an answer as training read it."""
    out = beside(trained, tmp_path, "pretrain", "sft", "rm")
    metrics = run_stages(small(merge__stage="rm"), out, "merge")["metrics"]
    folder = out / "cpu-tiny/v1/merge/model"
    exported = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = encoded(model, ANSWERS)
    assert plain_scores(exported, rows) == pytest.approx(plain_scores(plain, rows), abs=1e-5)
    for answer, row in zip(ANSWERS[:4], rows, strict=False):
        messages = [{"role": m.role, "content": m.content} for m in (*PROMPT, Message("assistant", answer))]
        assert tokenizer.apply_chat_template(messages, return_dict=False) == row.prompt + row.response
    assert metrics["score_change_of_merging"] <= 1e-5 < metrics["adapter_effect"]


@pytest.fixture
def command(trained, monkeypatch, capsys):
    changes = [part for key, value in SMALL.items() for part in ("--set", f"{key}={as_yaml(value)}")]

    def run(*arguments, out=trained):
        return rlhf(monkeypatch, capsys, "score", *arguments, "--recipe", RECIPE, "--out", out, *changes)

    return run


def test_pairs_have_the_scores_and_the_margins_of_the_stage(trained, command, tmp_path):
    """Those that the stage has kept, once more as a file of the user's."""
    kept = read_intact_lines(trained / "cpu-tiny/v1/rm/samples.jsonl")
    rows = [{"prompt": row["prompt"], "chosen": row["chosen"], "rejected": row["rejected"]} for row in kept]
    for row in rows:
        row["prompt"] = row["prompt"].removeprefix("\n\nHuman: ").removesuffix("\n\nAssistant:")
    plain = [row | {side: row[side]["response"] for side in ("chosen", "rejected")} for row in rows]
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in plain if "\n\n" not in row["prompt"])
    )
    code, _, err = command(tmp_path / "pairs.jsonl", "--to", tmp_path / "scores.jsonl")
    assert code == 0, err
    ours = {row["prompt"]: row for row in read_intact_lines(tmp_path / "scores.jsonl")}
    found = [row for row in kept if row["prompt"] in ours]
    assert len(found) > 2
    for theirs in found:
        for side in ("chosen", "rejected"):
            assert ours[theirs["prompt"]][side]["score"] == pytest.approx(theirs[side]["score"], abs=1e-5)


def test_pairs_that_share_a_prompt_are_no_independent_evidence():
    """Two prompts with three pairs each; a file of one pair for each prompt keeps Wilson's interval."""
    pair = {"chosen": "yes", "rejected": "no"}
    margins = [1.0, 1.0, 1.0, 1.0, -1.0, -1.0]

    def accuracy(prompts: str) -> stats.Estimate:
        items = [score.Item("x:1", PROMPT, pair) for _ in prompts]
        rows = [
            score.ScoredItem(item, prompt, {"chosen": margin, "rejected": 0.0})
            for item, prompt, margin in zip(items, prompts, margins, strict=True)
        ]
        return not_none(score.accuracy(rows))

    assert accuracy("aaabbb") == pytest.approx(stats.clustered_share([1, 1, 1, 1, 0, 0], "aaabbb"))
    assert accuracy("abcdef") == pytest.approx(stats.wilson(4, 6))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--prompt"),
        (("--response", "x"), "--prompt"),
        (("{rows}", "--prompt", "x", "--response", "y"), "--prompt"),
        (("{rows}", "--to", "{rows}"), "rows.jsonl"),
        (("nowhere.jsonl",), "nowhere.jsonl"),
        (("{rows}",), "rows.jsonl:2"),
    ],
)
def test_what_cannot_be_scored_is_one_line(command, tmp_path, arguments, named):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    code, _, err = command(*(argument.format(rows=tmp_path / "rows.jsonl") for argument in arguments))
    assert code and named in " ".join(err.split()) and "Traceback" not in err


def test_the_file_that_is_written_names_the_reward_model(model, trained, tmp_path):
    scored, _ = model.score([score.Item("", PROMPT, {"response": answer}) for answer in ANSWERS[:2]])
    score.write(scored, model.digest, tmp_path / "scores.jsonl")
    hashes = content_of(trained / "cpu-tiny/v1/rm/summary.json")["result_sha256"]
    named = {row["reward_model"] for row in read_intact_lines(tmp_path / "scores.jsonl")}
    assert named == {hashes["adapter/adapter_model.safetensors"][:16]}
