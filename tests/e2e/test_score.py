"""`rlhf score`: the same numbers as the stages have, for every kind of file, and clear refusals."""

import json
from typing import Any

import pytest

from rlhf import stats
from rlhf.data.batch import collate
from rlhf.data.load import divide_rows
from rlhf.data.source import read_source
from rlhf.evaluation import score, score_items
from rlhf.recipe import as_yaml
from rlhf.recipe.schema import Rm
from tests.helpers import RECIPE, SMALL, content_of, not_none, rlhf, small
from tests.lines import read_intact_lines


def told(row) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": message.content} for message in row]


@pytest.fixture(scope="module")
def heldout(trained, tmp_path_factory):
    """The pairs that the reward model was judged on, as a file of preference rows; and the rows."""
    loaded = small()
    corpus = divide_rows(read_source(loaded.recipe, trained / "cpu-tiny/v1/data"), loaded.recipe)
    pairs = corpus.pairs.test[: loaded.recipe.options(Rm).max_eval_samples]
    file = tmp_path_factory.mktemp("score") / "pairs.jsonl"
    rows = [{"prompt": told(p.prompt), "chosen": p.chosen, "rejected": p.rejected} for p in pairs]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, pairs


@pytest.fixture
def command(trained, monkeypatch, capsys):
    changes = [part for key, value in SMALL.items() for part in ("--set", f"{key}={as_yaml(value)}")]

    def run(*arguments, out=trained):
        return rlhf(monkeypatch, capsys, "score", *arguments, "--recipe", RECIPE, "--out", out, *changes)

    return run


def test_pairs_have_the_scores_and_the_accuracy_of_the_stage(trained, heldout, command, tmp_path):
    file, _ = heldout
    code, out, err = command(file, "--to", tmp_path / "scores.jsonl")
    assert code == 0, err
    rm = trained / "cpu-tiny/v1/rm"
    metrics = content_of(rm / "summary.json")["metrics"]
    rows = read_intact_lines(tmp_path / "scores.jsonl")
    assert len(rows) == metrics["heldout_pairs"] and rows[3]["source"] == f"{file}:4"
    margins = [row["margin"] for row in rows]
    assert sum((m > 0) + (m == 0) / 2 for m in margins) / len(margins) == metrics["accuracy"]
    assert sum(margins) / len(margins) == pytest.approx(metrics["margin"], abs=1e-6)
    assert f"scores higher in {metrics['accuracy']:.1%} of {len(rows)} pairs" in " ".join(out.split())
    for ours, theirs in zip(rows, read_intact_lines(rm / "samples.jsonl"), strict=False):
        assert ours["prompt"] == theirs["prompt"]
        for side in ("chosen", "rejected"):
            assert ours[side]["response"] == theirs[side]["response"]
            assert ours[side]["score"] == pytest.approx(theirs[side]["score"], abs=1e-5)
    assert {row["reward_model"] for row in rows} == {
        content_of(rm / "summary.json")["result_sha256"]["adapter/adapter_model.safetensors"][:16]
    }


def test_pairs_that_share_a_prompt_are_no_independent_evidence():
    """Two prompts with three pairs each; a file of one pair for each prompt keeps Wilson's interval."""
    pair = {"chosen": "yes", "rejected": "no"}

    def accuracy(margins: list[float], prompts: str) -> tuple[float, ...]:
        rows = zip(margins, prompts, strict=True)
        scored = [
            score.ScoredItem(score_items.Item("x:1", p, pair, {}), p, {"chosen": m, "rejected": 0.0}) for m, p in rows
        ]
        return not_none(score.summary(scored).accuracy)

    margins = [1.0, 1.0, 1.0, 1.0, -1.0, -1.0]
    assert accuracy(margins, "aaabbb") == pytest.approx(stats.clustered_share([1, 1, 1, 1, 0, 0], "aaabbb"))
    assert accuracy(margins, "abcdef") == pytest.approx(stats.wilson(4, 6))
    (_, low, high), (_, low_6, high_6) = accuracy(margins, "aaabbb"), accuracy(margins, "abcdef")
    assert high - low > high_6 - low_6 + 0.1


def test_every_way_to_name_an_answer_gives_the_same_score(trained, heldout, command, tmp_path):
    _, pairs = heldout
    pair = pairs[0]
    prompt = f"\n\nHuman: {pair.prompt[-1].content}\n\nAssistant:" if len(pair.prompt) == 1 else None
    assert prompt, "the toy world's first held-out pair has one turn"
    files = {
        "instruction": {"instruction": pair.prompt[0].content, "output": pair.chosen},
        "response": {"prompt": pair.prompt[0].content, "response": pair.chosen, "id": "x"},
        "transcript": {"prompt": prompt, "response": pair.chosen},
        "messages": {"prompt": told(pair.prompt), "response": pair.chosen},
        "sampled": {"step": 4, "prompt": prompt, "response": pair.chosen},
        "evaluated": {"step": 0, "prompt": prompt, "response": {"response": pair.chosen, "true_reward": 1.5}},
        "array": [{"prompt": pair.prompt[0].content, "response": pair.chosen}],
        "own step": {"step": 4, "prompt": pair.prompt[0].content, "response": pair.chosen},
    }
    for name, row in files.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    model = score.RewardModel(score.finished_stages(small(), trained))
    items = score_items.read([tmp_path / f"{name}.jsonl" for name in files])
    items += score_items.command_line_items(pair.prompt[0].content, [pair.chosen])
    assert len(items) == len(files) + 1
    scored, _ = model.score(items)
    (expected,) = read_intact_lines(trained / "cpu-tiny/v1/rm/samples.jsonl")[:1]
    assert [row.scores["response"] for row in scored] == pytest.approx([expected["chosen"]["score"]] * 9, abs=1e-5)
    score.write(scored, model.digest, tmp_path / "again.jsonl")
    again, _ = model.score(score_items.read([tmp_path / "again.jsonl"]))
    assert [row.scores for row in again] == [row.scores for row in scored]
    assert [row.prompt for row in again] == [row.prompt for row in scored]
    assert read_intact_lines(tmp_path / "again.jsonl")[5]["response"]["true_reward"] == 1.5


def test_a_system_message_beside_a_prompt_is_read_as_in_training(tmp_path):
    row = {"system": "Be brief.", "prompt": "Hi?", "response": "Hello."}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (item,) = score_items.read([tmp_path / "rows.jsonl"])
    assert told(item.prompt) == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}]


def test_samples_have_the_score_that_ppo_and_evaluation_give_their_tokens(trained, heldout, tmp_path):
    """The same prompts and answers once as ids through `SharedBase.scores`, once as the text of samples.jsonl."""
    _, pairs = heldout
    model = score.RewardModel(score.finished_stages(small(), trained))
    tokenizer, options = model.tokenizer, model.options
    sides, _ = tokenizer.encode([(p.prompt, p.rejected) for p in pairs], options.max_prompt_length, options.max_length)
    whole = [side for side in sides if side]
    assert len(whole) == len(sides)
    rollout = collate([s.prompt for s in whole], [s.response for s in whole], tokenizer.pad_id, tokenizer.eos_id)
    rows = [{"step": 0, "prompt": tokenizer.prompt_text(p.prompt), "ppo": {"response": p.rejected}} for p in pairs]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scored, _ = model.score(score_items.read([tmp_path / "samples.jsonl"]))
    found = [row.scores["ppo"] for row in scored]
    assert found == pytest.approx(model.shared.scores(rollout).tolist(), abs=1e-5)
    assert len(set(found)) > len(pairs) / 2


def test_one_prompt_from_the_command_line(command):
    code, out, err = command("--prompt", "Tell me two\x1b[31m colours.", "--response", "Red", "--response", "Blue.")
    assert code == 0, err
    assert "scores of 2 rows" in out and "Red" in out and "Blue." in out and "\x1b" not in out


def test_one_answer_is_one_row(command):
    assert "scores of 1 row\n" in command("--prompt", "Hi", "--response", "Red")[1]


def test_a_row_that_cannot_be_read_names_no_option_that_the_command_lacks(command, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"chosen": 1}\n')
    code, _, err = command(tmp_path / "rows.jsonl")
    assert code == 1 and "rows.jsonl:1: " in err and "on_bad_row" not in err


def test_what_was_cut_is_said(command, tmp_path):
    rows = [{"prompt": "long " * 300, "chosen": "yes " * 300, "rejected": "no"}]
    (tmp_path / "long.jsonl").write_text(json.dumps(rows[0]) + "\n")
    code, out, _ = command(tmp_path / "long.jsonl")
    assert code == 0 and "2 prompts were cut" in out and "1 responses were cut" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "name FILES to score, or one --prompt with at least one --response"),
        (("--prompt", "x"), 2, "name FILES to score"),
        (("--response", "x"), 2, "name FILES to score"),
        (("{file}", "--prompt", "x", "--response", "y"), 2, "FILES, or --prompt with --response, and not both"),
        (("{file}", "--to", "{file}"), 2, "is the same file as"),
        (("nowhere.jsonl",), 2, "nowhere.jsonl: no such file"),
        (("{texts}",), 1, "texts without prompts and answers; score needs pairs"),
        (("{damaged}",), 1, "damaged.jsonl:2: no prompt with an answer in this row"),
    ],
)
def test_what_cannot_be_scored_is_one_line(command, heldout, tmp_path, arguments, code, message):
    (tmp_path / "texts.jsonl").write_text('{"text": "Hello."}\n')
    (tmp_path / "damaged.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n')
    names = {"file": heldout[0], "texts": tmp_path / "texts.jsonl", "damaged": tmp_path / "damaged.jsonl"}
    found, _, err = command(*(argument.format(**names) for argument in arguments))
    assert found == code and message in " ".join(err.split()) and "Traceback" not in err


def test_a_reward_model_that_is_not_there_is_named(command, heldout, tmp_path):
    code, _, err = command(heldout[0], out=tmp_path)
    assert code == 1 and err.startswith("error: rm has not been run (") and "`rlhf run rm --with-parents" in err
