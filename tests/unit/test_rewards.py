"""Reward functions: what each gives, how they are named, what they are given, and what is refused in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.data import tokenize
from rlhf.data.corpus import Prompt, Split
from rlhf.data.rows import Message
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.recipe.schema_online import GroupOptions
from rlhf.recipe.stages import stage_name
from rlhf.stages.online.reward_sum import RewardSum
from rlhf.stages.online.rewards import find
from rlhf.stages.online.scores import mean_rewards
from tests.helpers import corpus_of, grouped

GSM8K = "numeric_answer(extract='#### (.*)')"  # as in the recipes for GSM8K


def asked(*texts: str, **more: list[Any]) -> dict[str, list[Any]]:
    """What functions are given for a prompt and a response, then another pair, and so on."""
    pairs: dict[str, list[Any]] = {"prompts": [*texts[::2]], "completions": [*texts[1::2]]}
    return pairs | {"answer": [None] * (len(texts) // 2)} | more


def given(name: str, completion: str, answer: str | None = None) -> float | None:
    words: dict[str, list[Any]] = {"answer": [answer], "completion_ids": [[1] * len(completion)]}
    (number,) = find(name, "grpo.reward_funcs")(asked("prompt", completion, **words))
    return number


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a module of rewards into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)

    return write


@pytest.mark.parametrize(
    ("name", "completion", "answer", "expected"),
    [
        ("exact_answer", " Paris.\n", "paris", 1),
        ("exact_answer", "It is Paris.", "Paris", 0),
        ("exact_answer", "New\n York", "new york!", 1),
        ("exact_answer", "Paris)", "Paris", 0),
        ("exact_answer(extract='It is (.*)')", "It is Rome. It is  Paris.", "Paris", 0),
        ("exact_answer(extract='It is (\\\\w+)')", "It is Rome. It is Paris.", "Paris", 1),
        ("exact_answer(extract='####(.*)')", "no mark", "?", 0),
        ("exact_answer(extract='####(.*)')", "#### ", "?", 0),
        ("exact_answer(extract='####(.*)')", "#### ?", "?", 1),
        ("exact_answer(extract='#### (a)?')", "#### ", "?", 0),
        ("exact_answer", " ", "?", 0),
        ("numeric_answer", "", "0", 0),
        ("regex(pattern='^$|Yes')", "", None, 0),
        ("length(most=4)", "", None, 0),
        ("numeric_answer", "3 and 4 make 7.", "7", 1),
        ("numeric_answer", "7 = 3 + 4", "7", 0),
        ("numeric_answer", "The result is \u22127.", "7", 0),
        ("numeric_answer", "The result is \u22127.", "-7", 1),
        ("numeric_answer", "1,234.50", "1234.5", 1),
        ("numeric_answer", "either 1,2", "12", 0),
        ("numeric_answer", "The point is (3,4)", "4", 1),
        ("numeric_answer", "1,2345", "12345", 0),
        ("numeric_answer(tolerance=0.01)", "100.9", "100", 1),
        ("numeric_answer(tolerance=0.01)", "101.1", "100", 0),
        ("numeric_answer(tolerance=0.01)", "0.009", "0", 1),
        ("numeric_answer", "-0.1e1", "-1", 1),
        ("numeric_answer", "it is .5", "0.5", 1),
        ("numeric_answer", "10-5", "5", 1),
        ("numeric_answer", "10-5", "-5", 0),
        ("numeric_answer", "x = -5", "-5", 1),
        ("numeric_answer", "2e-3", "0.002", 1),
        ("numeric_answer", "3 4", "34", 0),
        ("numeric_answer", "+3", "3", 1),
        ("numeric_answer", "3", "+3", 1),
        ("numeric_answer", "50%", "50%", 1),
        ("numeric_answer", "Answer: 3", "-3", 0),
        ("numeric_answer", "-$1,080", "-1080", 1),
        ("numeric_answer", "12345678901234567", "12345678901234568", 0),
        ("numeric_answer", "12345678901234568", "12,345,678,901,234,568.0", 1),
        ("numeric_answer", "0.1234567890123456789", "0.1234567890123456788", 0),
        ("numeric_answer", "1e99999999999999999999", "7", 0),
        ("numeric_answer", "-1e-99999999999999999999", "0", 1),
        ("numeric_answer", "The answer is \u20135.", "-5", 1),
        ("numeric_answer", "It is - 5", "5", 0),
        ("numeric_answer", "\uff0d\uff15\uff0e\uff12\uff15", "-5.25", 1),
        ("numeric_answer", "-5", "\u2011 5", 1),
        ("numeric_answer", "1\u200b250", "1250", 1),
        ("numeric_answer", "3\u20135", "5", 1),
        ("numeric_answer", "- 3 pears\n- 5 figs", "5", 1),
        ("exact_answer", "\uff21\u200bb\u3002", "ab", 1),
        ("exact_answer", "Cafe\u0301", "Café", 1),
        ("exact_answer", "Cafe", "Café", 0),
        ("numeric_answer(extract='#### (.*)')", "#### 5 then 6", "5", 0),
        ("numeric_answer(extract='#### (.*?)$')", "4\n#### 5", "5", 1),
        (GSM8K, "540 * 2 = <<540*2=1080>>1080\n#### $1,080", "It makes 540 twice.\n#### 1080", 1),
        (GSM8K, "It makes 1080.", "It makes 540 twice.\n#### 1080", 0),
        (GSM8K, "#### 540", "It makes 540 twice.\n#### 1080", 0),
        ("regex(pattern='^Yes')", "Yes, so it is", None, 1),
        ("regex(pattern='^Yes')", "Oh Yes", None, 0),
        ("length(most=4)", "one two three four", None, 0),
        ("length(most=4)", "one two three four five six", None, -0.5),
        ("length(most=4)", "x " * 30, None, -1),
        ("length(most=4)", "今天天气很好。", None, -0.5),
        ("length(most=4)", "สวัสดี", None, 0),
        ("regex(pattern='')", "\u2060\ufeff", None, 0),
    ],
)
def test_a_named_reward_judges_the_text_of_a_response(name, completion, answer, expected):
    assert given(name, completion, answer) == pytest.approx(expected)


def test_mathematics_is_compared_by_value():
    pytest.importorskip("math_verify", reason="math-verify comes with the math extra")
    assert given("math_answer", "so it is $\\frac{1}{2}$", "0.5") == 1
    assert given("math_answer", "so it is $x^2 + 2x + 1$", "$(x+1)^2$") == 1
    assert given("math_answer", "so it is $\\frac{1}{3}$", "0.5") == 0
    assert given("math_answer", "\\boxed{2\\sqrt{3}}", "2\\sqrt{3}") == 1
    assert given("math_answer", "It is 2.", "2\\sqrt{3}") == 0, "of a bare expression not the first number alone"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("exact", "exact_answer"),
        ("regex", "pattern"),
        ("regex(pattern='(')", "pattern"),
        ("regex('a')", "regex"),
        ("length(most=0)", "most"),
        ("numeric_answer(tolerance=-1)", "tolerance"),
        ("regex(**{'a': 1})", "regex"),
        ("__import__('os').system('true')", "regex"),
        ("no_such_module:f", "no_such_module"),
        ("json:no_such_function", "no_such_function"),
        ("", "regex"),
    ],
)
def test_what_is_no_reward_is_refused_in_one_line(name, key):
    with pytest.raises(UserError, match=r"^grpo\.reward_funcs: ") as error:
        find(name, "grpo.reward_funcs")
    assert key in str(error.value) and "\n" not in str(error.value)


# -- functions of the user's own ---------------------------------------------------------------------------------------


def test_a_function_gets_what_it_names(own):
    own(
        "own_rewards",
        "from helping import half\n"
        "def words(completions): return [half(len(c.split())) for c in completions]\n"
        "def every(**given): return [float(sorted(given) == NAMES)] * len(given['prompts'])\n"
        "NAMES = ['answer', 'completion_ids', 'completions', 'messages', 'prompts']\n"
        "def column(completions, *, level, note=None): return [float(x) for x in level]\n",
    )
    own("helping", "def half(number): return number / 2\n")
    lists = asked("p", "a b c", "q", "d", messages=[[], []], completion_ids=[[1], [2]], level=[3, 4])
    assert find("own_rewards:words", "here")(lists) == [1.5, 0.5]
    assert find("own_rewards:every", "here")(lists) == [1.0, 1.0]
    column = find("own_rewards:column", "here")
    assert column(lists) == [3.0, 4.0] and column.columns == ["level", "note"] and column.needs == ["level"]


def test_columns_of_rows_come_with_their_prompts(own):
    """A prompt without a column that a function needs is left out, and where none is left the column is named."""
    own("leveled", "def f(completions, level): return [float(x) for x in level]\n")
    prompts: list[Prompt] = [(Message("user", text),) for text in ("One?", "Two?", "Three?")]
    options: Any = grouped("grpo", {"reward_funcs": ["leveled:f"], "normalize_scores": False}).recipe.online()["grpo"]
    tokenizer = DialogueTokenizer(tokenize.words(300), "hh")
    known = {prompts[0]: {"level": 5}, prompts[2]: {"level": 7}}
    asked_for: list[str] = []

    def columns(names: Any) -> Any:
        asked_for.extend(names)
        return known

    rewards = RewardSum("grpo", [options], corpus_of(columns=columns), tokenizer)
    assert asked_for == ["level"]
    assert rewards.usable(Split(prompts, prompts[:1])).train == [prompts[0], prompts[2]]
    given = rewards([prompts[2], prompts[0]], ["a", "b"], [[1], [2]])
    assert given.by_name["leveled.f"].tolist() == [7.0, 5.0]
    with pytest.raises(UserError, match=r"^grpo.*'level'.*leveled:f"):
        RewardSum("grpo", [options], corpus_of(), tokenizer).usable(Split(prompts, prompts))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("return [1 / len(c) for c in completions]", "ZeroDivisionError"),
        ("return [sys.exit('no key') if not c else 1.0 for c in completions]", "SystemExit"),
        ("return 3.0", "TypeError"),
        ("return [1.0, float('nan')][-len(completions):]", "nan"),
        ("return ['1'] * len(completions)", "'1'"),
    ],
)
def test_what_fails_is_named_with_its_question(own, tmp_path, body, kind):
    own("failing", f"import sys\ndef f(completions):\n    {body}\n")
    with pytest.raises(UserError, match=f"^reward failing:f .*{kind}.*") as error:
        find("failing:f", "here")(asked("first", "fine", "second", ""))
    said = str(error.value)
    assert "\n" not in said and ("second" in said or "first" in said)
    line = 3 if kind in ("ZeroDivisionError", "SystemExit") else 2  # of what it returned: where it begins
    assert f"{tmp_path / 'failing.py'}:{line}" in said and ("second" in said or line == 2)


def test_a_module_that_cannot_be_imported_is_named_with_its_line(own, tmp_path):
    own("unready", "import json\nraise RuntimeError('not yet')\n")
    with pytest.raises(UserError, match=rf"^here: unready:f.*RuntimeError: not yet.*{tmp_path / 'unready.py'}:2"):
        find("unready:f", "here")
    own("broken", "x = 1\ndef f(:\n")
    with pytest.raises(UserError, match=rf"^here: broken:f.*{tmp_path / 'broken.py'}:2"):
        find("broken:f", "here")
    own("short", "def f(completions): return [1.0]\n")
    with pytest.raises(UserError, match=r"short:f .*1 numbers for 2"):
        find("short:f", "here")(asked("p", "a", "q", "b"))


def test_no_library_finds_a_file_of_the_user_s(own, tmp_path):
    """Of an installed library's name, or of one that libraries look for, such as `vllm`."""
    for name in ("json", "trl", "some_optional_library"):
        own(name, "def f(completions): return [2.0] * len(completions)\n")
        assert find(f"{name}:f", "here")(asked("p", "a")) == [2.0]
    assert json.loads("1") == 1 and str(tmp_path) not in sys.path
    with pytest.raises(ModuleNotFoundError):
        __import__("some_optional_library")


def test_what_a_function_does_to_this_process_is_undone(own, tmp_path):
    own(
        "hostile",
        "import os, random, sys\nimport numpy as np\nimport torch\n"
        "random.seed(1), np.random.seed(1), torch.manual_seed(1), os.chdir('/')\n"
        "def f(completions, prompts):\n"
        "    random.seed(2), np.random.seed(2), torch.manual_seed(2), os.chdir('/'), prompts.clear()\n"
        "    if os.fork() == 0 and completions[0] == 'raises': raise ValueError\n"
        "    return [1.0 for _ in completions]\n"
        "def draws(completions): return [random.random() + np.random.rand() + torch.rand(1).item()]\n",
    )
    torch.manual_seed(5)
    before, process = torch.get_rng_state(), os.getpid()
    for text in ("comes back", "raises"):
        lists = asked("p", text)
        assert find("hostile:f", "here")(lists) == [1.0] and lists["prompts"] == ["p"]
        assert os.getpid() == process, "a child came back"
    drawn = find("hostile:draws", "here")
    assert drawn(asked("p", "a"), 3) == drawn(asked("p", "a"), 3) != drawn(asked("p", "a"), 4)
    assert torch.equal(torch.get_rng_state(), before) and Path.cwd() == tmp_path


@pytest.mark.parametrize(
    "body", ["time.sleep(60)", "re.match('(a+)+$', 'a' * 40 + 'b')", "signal.alarm(0) or time.sleep(60)"]
)
def test_a_call_that_takes_too_long_ends_the_process_in_a_line(own, tmp_path, body):
    own("slow", f"import re, signal, time\ndef f(completions):\n    {body}\n    return [1.0]\n")
    code = (
        "from rlhf.stages.online.rewards import find; "
        "f = find('slow:f', 'here'); f.timeout = 0.3; f({'prompts': ['One?'], 'completions': ['a']})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == -9
    assert done.stderr.count("\n") == 1 and "slow:f" in done.stderr and "reward_timeout: 0.3 s" in done.stderr
    assert "One?" in done.stderr


def test_a_function_may_be_async_and_have_no_verdict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges.py").write_text(
        "import asyncio\n"
        "async def late(completions):\n"
        "    await asyncio.sleep(0)\n"
        "    return [None if c == 'x' else float(len(c)) for c in completions]\n"
        "def other(completions): return [None if 'x' in c else 1.0 for c in completions]\n"
        "async def bad(completions): return [1 / len(c) for c in completions]\n"
    )
    assert find("judges:late", "here")(asked("p", "a b", "q", "x")) == [3.0, None]
    with pytest.raises(UserError, match=r"bad failed with ZeroDivisionError.*prompt 'q' and the response ''$"):
        find("judges:bad", "here")(asked("p", "a", "q", ""))
    prompt = (Message("user", "Say it."),)
    changes = {"reward_funcs": ["judges:late", "judges:other"], "reward_weights": [2.0, 0.5], "normalize_scores": False}
    options = grouped("grpo", changes).recipe.online()["grpo"]
    assert isinstance(options, GroupOptions)
    reward_sum = RewardSum("grpo", [options], corpus_of(), DialogueTokenizer(tokenize.words(300), "hh"))
    responses = [prompt] * 3, ["ab", "x", "xx"], [[0]] * 3
    by_name, total = reward_sum(*responses)
    assert total.nan_to_num(-1).tolist() == [4.5, -1, -1]
    reward_sum.functions["judges.other"].weight = 0.0  # measures, and need not judge
    assert reward_sum(*responses).total.nan_to_num(-1).tolist() == [4.0, -1, 4.0]
    assert {name: mean.item() for name, mean in mean_rewards(by_name).items()} == {
        "rewards/judges.late": 2.0,
        "rewards/judges.other": 1.0,
    }
    assert mean_rewards({"none": 0 * by_name["judges.other"][1:2]}) == {}, "no mean, and not 0"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("exact_answer", " "),
        ("numeric_answer", "twelve"),
        ("math_answer", ""),
    ],
)
def test_answers_that_no_response_can_match_are_refused_before_training(name, answer):
    if name == "math_answer":
        pytest.importorskip("math_verify", reason="math-verify comes with the math extra")
    good, bad = (Message("user", "One?"),), (Message("user", "Twelve?"),)
    options = grouped("grpo", {"reward_funcs": [name], "normalize_scores": False}).recipe.online()["grpo"]
    assert isinstance(options, GroupOptions)
    tokenizer = DialogueTokenizer(tokenize.words(300), "hh")
    assert RewardSum("grpo", [options], corpus_of({good: "1"}), tokenizer).usable(Split([good], [good])).train == [good]
    with pytest.raises(UserError, match=rf"{name} .*the answer .*Twelve\?.*") as error:
        RewardSum("grpo", [options], corpus_of({good: "1", bad: answer}), tokenizer).usable(Split([good], [good, bad]))
    assert "\n" not in str(error.value)


def test_an_evaluation_keeps_functions_of_one_name_apart():
    """Both sections call a reward `length`, with another limit each; `exact_answer` is the same in both."""
    prompt = (Message("user", "Say it."),)
    sections: list[Any] = []
    for stage, most in (("rloo", 3), ("grpo", 60)):
        funcs = [f"length(most={most})", "exact_answer"]
        options = grouped(stage, {"reward_funcs": funcs, "normalize_scores": False}).recipe.section(stage_name(stage))
        sections.append(options)
    rewards = RewardSum("evaluate", sections, corpus_of({prompt: "b"}), DialogueTokenizer(tokenize.words(300), "hh"))
    assert {label: function.name for label, function in rewards.functions.items()} == {
        "length": "length(most=3)",
        "exact_answer": "exact_answer",
        "length_2": "length(most=60)",
    }
    by_name = rewards([prompt], ["a b c d e"], [[1, 2]]).by_name
    assert by_name["length"] != by_name["length_2"]
