"""`rlhf sample`: answers to prompts of one's own, as an evaluation samples and scores them."""

import json

import pytest

from rlhf.evaluation import own_prompts
from tests.helpers import RECIPE, beside, rlhf, run_stages, small
from tests.lines import read_intact_lines


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory):
    out = beside(trained, tmp_path_factory.mktemp("sample"), "pretrain", "sft", "rm")
    run_stages(small(evaluate__num_samples=2, evaluate__max_samples=4, ppo__steps=2), out, "ppo", "evaluate")
    return out / RECIPE.parent.name / RECIPE.name


@pytest.fixture(scope="module")
def heldout(run, tmp_path_factory):
    """What the evaluation has sampled, and its prompts as a file."""
    rows = read_intact_lines(run / "evaluate/samples.jsonl")
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts = dict.fromkeys(row["prompt"] for row in rows)
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return rows, file


def test_the_answers_are_those_of_the_evaluation(run, heldout, monkeypatch, capsys, tmp_path):
    rows, file = heldout
    options = ("--n", 2, "--to", tmp_path / "answers.jsonl", "--page", tmp_path / "page.html")
    code, out, err = rlhf(monkeypatch, capsys, "sample", run, "--prompts", file, *options)
    assert code == 0, err
    ours = read_intact_lines(tmp_path / "answers.jsonl")
    for row in rows:
        for policy in ("base", "sft", "ppo"):
            row[policy].pop("true_reward")
    assert ours == rows
    assert out.count("Person:") == len(rows) / 2
    page = (tmp_path / "page.html").read_text()
    assert page.count('class="sample"') == len(rows) / 2 and page.count(f"{rows[-1]['ppo']['score']:.3f}") >= 1


def test_prompts_are_lines_of_a_text_or_rows_of_data(run, monkeypatch, capsys, tmp_path):
    """Each once; one that repeats another is counted, and so is one that is cut."""
    text, data = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text(f"Hi, you; there?\n\n  two {'words ' * 300}\nHi, you; there?\n")
    data.write_text('{"prompt": "Hi, you; there?", "chosen": "a", "rejected": "b"}\n')
    assert own_prompts.read(text).prompts[:1] == own_prompts.read(data).prompts
    code, out, err = rlhf(monkeypatch, capsys, "sample", run, "--prompts", text, "--stages", "sft,base", "--tokens", 2)
    assert (code, out.count("Person:")) == (0, 2) and "ppo" not in out and out.index("base") < out.index("sft")
    cut = "1 prompt cut to the last 192 tokens (evaluate.max_prompt_length)"
    assert err == f"{text}: 1 repeated prompt left out\n{cut}\n"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("\n \n", (), "p.txt: no prompts; write one on each line"),
        ("one", ("--stages", "ppo dop"), "'dop' is none of base, sft, ppo"),
        ("one", ("--stages", "dpo"), "dpo has not been run"),
        ("one", ("--page", "p.txt"), "p.txt is the same file as p.txt, which is read"),
        ("one", ("--page", "x.jsonl", "--to", "x.jsonl"), "--to and --page name the same file"),
        ("one", ("--n", "0"), "0 is not in the range"),
    ],
)
def test_what_cannot_be_sampled_is_refused(run, monkeypatch, capsys, tmp_path, content, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text(content)
    code, _, err = rlhf(monkeypatch, capsys, "sample", run, "--prompts", "p.txt", *options)
    assert code and message in err and len(err.splitlines()) == 1
