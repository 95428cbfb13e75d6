"""One answer has one score, whatever computes it: stage, command, PPO, evaluation, plain transformers with peft."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf.data.batch import collate
from rlhf.data.rows import Message
from rlhf.data.tokenize import Encoded
from rlhf.errors import UserError
from rlhf.evaluation import score, score_items
from rlhf.evaluation.reward_model import scores_of
from rlhf.models.loading import load_merged
from rlhf.stages.online.role_passes import reward_scores
from tests.helpers import beside, content_of, run_stages, small

PROMPT = (Message("user", "Name a colour."),)
ANSWERS = ["Red.", "  Red.", "Red. \n", "Red.\n\n", "A lemon is a kind of fruit. " * 20, ""]


@pytest.fixture(scope="module")
def model(trained) -> score.RewardModel:
    return score.RewardModel(score.finished_stages(small(), trained))


@pytest.fixture(scope="module")
def plain(trained) -> PeftModel:
    """The saved adapter in plain peft and transformers, which find the last real token themselves."""
    folder = trained / "cpu-tiny/v1"
    base = AutoModelForSequenceClassification.from_pretrained(folder / "pretrain/model", num_labels=1)
    return PeftModel.from_pretrained(base, folder / "rm/adapter").eval()


@torch.no_grad()
def plain_scores(plain: PeftModel, rows: list[Encoded]) -> list[float]:
    return [plain(input_ids=torch.tensor([row.prompt + row.response])).logits.item() for row in rows]


def encoded(model: score.RewardModel, answers: list[str]) -> list[Encoded]:
    options = model.options
    rows, _ = model.tokenizer.encode(
        [(PROMPT, answer) for answer in answers], options.max_prompt_length, options.max_length
    )
    assert all(rows)
    return [row for row in rows if row]


def routes(model: score.RewardModel, plain: PeftModel, rows: list[Encoded]) -> dict[str, list[float]]:
    """The scores of the same tokens by each route that reads tokens."""
    tokenizer, shared = model.tokenizer, model.shared
    rollout = collate([row.prompt for row in rows], [row.response for row in rows], tokenizer.pad_id, tokenizer.eos_id)

    @torch.no_grad()
    def stage(ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = plain(input_ids=ids).logits
        return logits.squeeze(-1)

    return {
        "the stage rm": scores_of(rows, stage, tokenizer.pad_id, 4).tolist(),
        "evaluate": scores_of(rows, shared.scores_at, tokenizer.pad_id, 4).tolist(),
        "samples": shared_scores(model, rollout),
        "ppo": reward_scores(shared, rollout, 4).tolist(),
        "ppo, row by row": reward_scores(shared, rollout, 1).tolist(),
    }


def shared_scores(model: score.RewardModel, rollout) -> list[float]:
    scores: list[float] = model.shared.scores(rollout).tolist()
    return scores


def test_the_same_tokens_have_the_same_score(model, plain):
    """Answers that end, those that are cut, EOS alone, and white space at both ends."""
    tokenizer = model.tokenizer
    ended = encoded(model, ANSWERS)
    assert [row.response[-1] == tokenizer.eos_id for row in ended] == [True] * 4 + [False, True]
    cut = [Encoded(row.prompt, row.response[:-1]) for row in ended[:4]]  # as sampling cuts them
    rows = [*ended, *cut, Encoded(ended[0].prompt, [tokenizer.eos_id])]
    expected = plain_scores(plain, rows)
    assert len({round(number, 5) for number in expected}) > 5
    for name, found in routes(model, plain, rows).items():
        assert found == pytest.approx(expected, abs=2e-5), name


@torch.no_grad()
def test_an_exported_reward_model_gives_the_same_scores_from_ids_and_from_messages(model, trained, tmp_path, plain):
    """It is a plain classifier of transformers; its tokenizer's chat template writes an answer as training read it."""
    out = beside(trained, tmp_path, "pretrain", "sft", "rm")
    metrics = run_stages(small(merge__stage="rm"), out, "merge")["metrics"]
    folder = out / "cpu-tiny/v1/merge/model"
    exported = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = encoded(model, ANSWERS)
    ours = scores_of(rows, model.shared.scores_at, model.tokenizer.pad_id, 4).tolist()
    by_ids = [exported(input_ids=torch.tensor([row.prompt + row.response])).logits.item() for row in rows]
    assert by_ids == pytest.approx(ours, abs=1e-5) and by_ids == pytest.approx(plain_scores(plain, rows), abs=1e-5)
    for answer, row in zip(ANSWERS[:4], rows, strict=False):
        messages = [{"role": m.role, "content": m.content} for m in (*PROMPT, Message("assistant", answer))]
        assert tokenizer.apply_chat_template(messages, return_dict=False) == row.prompt + row.response
    assert metrics["largest_score_difference"] <= 1e-5 < metrics["adapter_effect"]
    rm = content_of(trained / "cpu-tiny/v1/rm/summary.json")["metrics"]
    assert (exported.config.score_mean, exported.config.score_sd) == (rm["score_mean"], rm["score_sd"])
    with pytest.raises(UserError, match="has no place for them: take the config"):
        load_merged(folder, torch.device("cpu"))


def test_a_cut_answer_may_end_with_the_padding_token(model, plain):
    """Places are counted here; plain transformers looks for the last token that is not padding: one place earlier."""
    (row,) = encoded(model, ["Red."])
    cut = Encoded(row.prompt, [*row.response[:-1], model.tokenizer.pad_id])
    rollout = collate([cut.prompt], [cut.response], model.tokenizer.pad_id, model.tokenizer.eos_id)
    counted = shared_scores(model, rollout)
    assert scores_of([cut], model.shared.scores_at, model.tokenizer.pad_id, 1).tolist() == pytest.approx(
        counted, abs=2e-5
    )
    shorter = Encoded(row.prompt, row.response[:-1])
    assert plain_scores(plain, [cut]) == pytest.approx(plain_scores(plain, [shorter]), abs=2e-5)
    assert plain_scores(plain, [cut]) != pytest.approx(counted, abs=2e-5)


def test_the_command_scores_the_tokens_that_training_read(model, plain, tmp_path):
    """As an argument, in a row, and again from the file that the command wrote."""
    expected = plain_scores(plain, encoded(model, ANSWERS))
    argued, _ = model.score(score_items.command_line_items(PROMPT[0].content, ANSWERS))
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": PROMPT[0].content, "response": answer} for answer in ANSWERS if answer]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read, _ = model.score(score_items.read([file]))
    score.write(read, model.digest, tmp_path / "again.jsonl")
    again, _ = model.score(score_items.read([tmp_path / "again.jsonl"]))
    assert len({round(number, 5) for number in expected[:4]}) > 1, "white space is read as it stands"
    assert [v for row in argued for v in row.scores.values()] == pytest.approx(expected, abs=2e-5)
    for scored in (read, again):
        assert [row.scores["response"] for row in scored] == pytest.approx(expected[:-1], abs=2e-5)
