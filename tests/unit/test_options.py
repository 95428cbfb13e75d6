"""What a command would write or read is refused before any work: devices, pipes, directories, numbers out of range."""

import json
import os
import stat

import click
import pytest
from click.parser import _OptionParser as OptionParser

from rlhf import files
from rlhf.cli import cli
from rlhf.cli.options import StrictCommand, listed
from rlhf.process.sizes import size_in_bytes
from tests.helpers import RECIPE, noted, rlhf

LINE = json.dumps({"prompt": "Hi", "chosen": "yes it is", "rejected": "no"}) + "\n"


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(LINE.replace("Hi", f"Hi {i}") for i in range(3)))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "runs").mkdir()
    return lambda *arguments: rlhf(monkeypatch, capsys, *arguments)


COMMANDS = {
    "check": ("data", "check", "rows.jsonl"),
    "convert": ("data", "convert", "rows.jsonl"),
    "report": ("report", "--recipe", RECIPE),
    "score": ("score", "rows.jsonl", "--recipe", RECIPE),
}


@pytest.mark.parametrize("to", ["/dev/full", "/dev/null", "pipe", "folder", "rows.jsonl/x", "x" * 5000, "x\0y"])
@pytest.mark.parametrize("name", COMMANDS)
def test_what_cannot_be_a_result_is_refused_before_any_work(command, name, to):
    code, out, err = command(*COMMANDS[name], "--to", to)
    assert code == 2, err
    assert not out
    assert "Traceback" not in err and "\0" not in err
    assert max(map(len, err.splitlines())) <= 2000
    assert {"/dev/full": "a pipe or a device", "pipe": "a pipe or a device", "folder": "is a directory"}.get(
        to, ""
    ) in err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_result_goes_into_a_folder_that_exists(command, tmp_path, name):
    code, out, err = command(*COMMANDS[name], "--to", "new/inner/result")
    assert (code, out) == (2, "")
    assert "new/inner/result: there is no folder new/inner; make it first" in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "words",
    [
        "data check absent",
        "data check rows.jsonl absent",
        "data check rows.jsonl --heldout absent",
        "data show absent",
        "data convert absent --to new.jsonl",
        "score absent --hw cpu",
        "results absent",
        "report absent",
        "report runs absent",
        "compare absent runs",
        "compare runs absent",
        "compare runs runs --scored absent --scored rows.jsonl",
    ],
)
def test_an_absent_argument_is_a_mistake_in_the_command(command, words):
    code, out, err = command(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith("error: absent: no such f") and err.count("\n") == 1


@pytest.mark.parametrize("words", ["report folder", "compare folder folder"])
def test_a_folder_without_a_run_is_an_explained_error(command, words):
    code, out, err = command(*words.split())
    assert (code, out) == (1, "")
    assert err.startswith("error: folder") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("ppo --hw cpu", "'rlhf run ppo'"),
        ("evaluate", "'rlhf run evaluate'"),
        ("train", "'rlhf run STAGE'"),
        ("data-check rows.jsonl", "'rlhf data check'"),
        ("plann", "'plan'"),
        ("run pppo", "'ppo'"),
        ("run ppo --hw cpu --stop-on nann", "'nan'"),
        ("run ppo --hw cpu --report-to tensorbord", "'tensorboard'"),
        ("plan --hw cpu --stage sfft", "'sft'"),
        ("data show rows.jsonl --only duplicate", "'duplicates'"),
        # the option that is missing before an argument
        ("plan 4090", "--hw 4090"),
        ("fetch 4090", "--hw 4090"),
        ("chat 4090 --stage ppo", "--hw 4090"),
        ("plan folder", "--recipe folder"),
    ],
)
def test_what_a_wrong_word_probably_means_is_said(command, words, meant):
    code, out, err = command(*words.split())
    assert (code, out) == (2, "")
    assert f"Did you mean {meant}?" in err and err.count("\n") == 1


@pytest.mark.parametrize(("words", "lists"), [("help", "`rlhf --help`"), ("help plan", "`rlhf --help`")])
def test_the_word_help_is_answered_with_the_option(command, words, lists):
    code, out, err = command(*words.split())
    assert (code, out) == (2, "") and f"{lists} lists the commands" in err


def test_the_commands_on_data_are_listed_in_the_order_of_use(command):
    out = command("data", "--help")[1]
    assert out.index("  check ") < out.index("  show ") < out.index("  convert ")


@pytest.mark.parametrize("to", ["sft/summary.json", "sft/new.jsonl", "sft/adapter/x.bin", "link/summary.json"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_result_replaces_a_record_of_a_run(command, tmp_path, name, to):
    (tmp_path / "sft" / "adapter").mkdir(parents=True)
    (tmp_path / "sft" / "summary.json").write_text("{}")
    (tmp_path / "link").symlink_to("sft")
    code, out, err = command(*COMMANDS[name], "--to", to)
    assert (code, out) == (2, "")
    assert "name a file outside of it" in " ".join(err.split())
    assert (tmp_path / "sft" / "summary.json").read_text() == "{}"
    assert len(list((tmp_path / "sft").iterdir())) == 2


@pytest.mark.parametrize("to", ["rows.jsonl", "./folder/../rows.jsonl", "hard.jsonl", "soft.jsonl"])
@pytest.mark.parametrize("words", [["data", "check"], ["data", "check", "other.jsonl", "--heldout"], ["score"]])
def test_no_result_replaces_what_is_read(command, tmp_path, words, to):
    rows = tmp_path / "rows.jsonl"
    (tmp_path / "other.jsonl").write_text(LINE)
    (tmp_path / "hard.jsonl").hardlink_to(rows)
    (tmp_path / "soft.jsonl").symlink_to(rows)
    before = rows.read_bytes()
    changes = ["--recipe", RECIPE] if words == ["score"] else []
    code, out, err = command(*words, "rows.jsonl", "--to", to, *changes)
    assert (code, out) == (2, ""), err
    assert "is the same file as rows.jsonl" in " ".join(err.split())
    assert rows.read_bytes() == before


@pytest.mark.parametrize("words", [("run", "sft"), ("report",), ("chat",)])
def test_an_empty_root_of_runs_is_refused(command, words):
    code, _, err = command(*words, "--recipe", RECIPE, "--out", "")
    assert code == 2 and "'--out': is empty" in err


def test_an_earlier_output_is_replaced_as_a_whole_or_kept(tmp_path):
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "page.html").chmod(0o600)
    (tmp_path / "link.html").symlink_to("page.html")
    files.write_output(tmp_path / "link.html", "new")
    assert (tmp_path / "page.html").read_text() == "new" and (tmp_path / "link.html").is_symlink()
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == 0o600, "private as before"
    with pytest.raises(UnicodeEncodeError):
        files.write_output(tmp_path / "page.html", "half a character \ud800")
    assert (tmp_path / "page.html").read_text() == "new"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link.html", "page.html"]


@pytest.mark.parametrize("seed", [2**32, 10**30])
@pytest.mark.parametrize("words", [("run", "pretrain", "--seed"), ("reproduce", "--seeds"), ("score", "--seed")])
def test_a_seed_has_32_bits(command, words, seed):
    *head, option = words
    code, _, err = command(*head, "--recipe", RECIPE, option, str(seed))
    assert code == 2
    assert option.strip("-") in err


@pytest.mark.parametrize(
    "text", ["12", "12XB", "12TB", "12 TB", "GB", "0GB", "-1GB", "1e3GB", "nan GB", "9" * 400 + "GB", "1e9GB", ""]
)
def test_a_size_has_a_unit_and_a_bound(text):
    assert size_in_bytes(text) is None
    assert size_in_bytes("12GB") == 12 * 10**9 and size_in_bytes("1.5 GiB") == 1.5 * 2**30


def test_nothing_is_searched_without_a_unit(command):
    code, _, err = command("plan", "--recipe", RECIPE, "--fit", "12")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "with its unit" in err


RECORDS = {
    "seeds0": {"seeds": {}},
    "seedsx": {"seeds": None},
    "seedsy": {"seeds": 3},
    "stages": {"seeds": {"0": {"sft": None}}},
    "nothing": {},
    "no-stage": {"seeds": {"0": {}}, "device": {"type": "cpu", "name": "x", "threads": 1}},
    "escape": {"seeds": {"0": {"sft": {"targets": [], "stage": "\x1b", "wall_seconds": "x"}}}},
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_is_none_is_one_line(command, tmp_path, name):
    (tmp_path / "record.json").write_text(json.dumps(RECORDS[name]))
    code, out, err = command("results", "record.json")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert err.startswith("error: record.json: key 'recipe' is missing: damaged") and "\x1b" not in err


@pytest.mark.parametrize(("chosen", "rejected"), [("", ""), ("yes it is", "yes it is")])
def test_data_of_which_nothing_is_left_ends_in_an_error(command, tmp_path, chosen, rejected):
    rows = [{"prompt": f"Hi {i}", "chosen": chosen, "rejected": rejected} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = command("data", "check", "rows.jsonl")
    assert (code, len(err.splitlines())) == (1, 1)
    expected = (
        "error: rows.jsonl: rows kept 0: Nothing is left to train on. The lines above say why rows were left out."
    )
    assert err.strip() == expected
    assert out.index("identical" if chosen else "empty") < out.index("rows kept")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, 1) for name in ("pipe", "/dev/zero", "/dev/full", "/dev/kmsg")),
        *((name, 2) for name in ("\x1b[31m" + "x" * 200, "x" * 5000)),  # absent
    ],
)
def test_data_that_is_no_file_is_refused(command, name, expected):
    code, _, err = command("data", "check", name)
    assert (code, len(err.splitlines())) == (expected, 1)
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "--hw", "cpu", "--hw", "4090"), "--hw is given twice; leave one of them out"),
        (("run", "sft", "--resume", "--restart"), "--resume and --restart exclude each other; give one"),
        (("run", "sft", "--no-preflight", "--preflight"), "--preflight and --no-preflight exclude each other"),
        (("run", "sft", "--resume", "--resume"), "--resume is given twice; leave one of them out"),
        (("plan", "--hw=cpu", "--hw=4090"), "--hw is given twice"),
        (("data", "check", "a.jsonl", "--seed", "1", "--seed", "2"), "--seed is given twice"),
    ],
)
def test_an_option_that_is_given_twice_is_refused(monkeypatch, capsys, words, message):
    code, _, err = rlhf(monkeypatch, capsys, *words)
    assert code == 2 and message in err


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("--bogus", ""),
        ("--ot", " Did you mean '--out'?"),
        ("--with-parent", " Did you mean '--with-parents'?"),
        ("-x", ""),
    ],
)
def test_only_options_that_are_near_are_named(command, typed, near):
    code, out, err = command("run", "ppo", "--hw", "cpu", typed)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: No such option {typed!r}.{near} (`rlhf run --help`)")


@pytest.mark.parametrize("text", ["0 1 2", "0,1,2", "0, 1,2", " 0 1, 2 "])
def test_commas_and_spaces_separate_the_words_of_a_list(text):
    assert listed(text) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("reproduce", "--hw", "cpu", "--seeds", "0,1,01"), "'0,1,01' names a seed twice"),
        (("reproduce", "--hw", "cpu", "--seeds", "0,1;2"), "'0,1;2': whole numbers below 2^32, separated by commas"),
        (("reproduce", "--hw", "cpu", "--until", "sft,pppo"), "pppo"),
        (("new", "--model", "m", "--card", "24GB", "--stages", "ppo sft"), "--stages ppo,sft: sft is none of"),
        (("new", "--model", "m", "--card", "24GB", "--stages", ","), "--stages '': name one or several of"),
    ],
)
def test_a_list_with_a_wrong_word_is_refused(command, words, message):
    code, out, err = command(*words)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_a_report_without_anything_asks_for_runs(command):
    code, _, err = command("report")
    assert code == 2 and err.startswith("error: name run directories, or a recipe: --hw NAME or --recipe DIR")


def test_every_command_refuses_repeated_options():
    def commands(group):
        for command in group.commands.values():
            yield from commands(command) if isinstance(command, click.Group) else [command]

    assert all(isinstance(command, StrictCommand) for command in commands(cli))


@pytest.mark.parametrize(
    "words", [("run", "rm", "runs"), ("score", "rows.jsonl", "--hw", "cpu"), ("plan", "--hw", "4091")]
)
def test_arguments_are_parsed_once(command, monkeypatch, words):
    parsed: list[list[str]] = []
    parse = OptionParser.parse_args
    monkeypatch.setattr(OptionParser, "parse_args", lambda self, args: parse(self, noted(parsed, list(args), args)))
    command(*words)
    assert parsed == [[*words], [*words[1:]]], "the group's, which names the command, and the command's own"
