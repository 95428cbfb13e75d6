"""Reward functions: what each gives, how they are named, and what is refused in one line."""

import inspect
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf.data import tokenize
from rlhf.data.corpus import Split
from rlhf.data.rows import Message
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.errors import UserError
from rlhf.recipe.schema_online import GroupOptions
from rlhf.recipe.stages import stage_name
from rlhf.stages.evaluate import _reward_fn, _reward_functions
from rlhf.stages.online import named_rewards
from rlhf.stages.online import reward_functions as rewards
from rlhf.stages.online.reward_sum import RewardSum, mean_rewards
from tests.helpers import grouped

ROOT = Path(__file__).parents[2]
GSM8K = "numeric_answer(extract='#### (.*)')"  # as in the recipes for GSM8K


def given(name: str, completion: str, answer: str | None = None) -> float | None:
    (number,) = rewards.find(name, "grpo.reward_funcs")(["prompt"], [completion], [answer])
    return number


@pytest.mark.parametrize(
    ("name", "completion", "answer", "expected"),
    [
        ("exact_answer", " Paris.\n", "paris", 1),
        ("exact_answer", "It is Paris.", "Paris", 0),
        ("exact_answer", "Paris?", "Paris", 1),
        ("exact_answer", "paris  ,", "Paris", 1),
        ("exact_answer", "New\n York", "new york!", 1),
        ("exact_answer", "Paris)", "Paris", 0),
        ("exact_answer(extract='It is (.*)')", "It is Rome. It is  Paris.", "Paris", 0),
        ("exact_answer(extract='It is (\\\\w+)')", "It is Rome. It is Paris.", "Paris", 1),
        ("exact_answer(extract='####(.*)')", "no mark", "", 0),
        ("exact_answer(extract='####(.*)')", "no mark", "?", 0),
        ("exact_answer(extract='####(.*)')", "#### ", "?", 0),
        ("exact_answer(extract='####(.*)')", "#### !", "?", 0),
        ("exact_answer(extract='####(.*)')", "#### ?", "?", 1),
        ("exact_answer(extract='#### (a)?')", "#### ", "?", 0),
        ("exact_answer", "", "", 0),
        ("exact_answer", " ", "?", 0),
        ("numeric_answer", "", "0", 0),
        ("regex(pattern='^$|Yes')", "", None, 0),
        ("json_valid", "", None, 0),
        ("length(most=4)", "", None, 0),
        ("numeric_answer", "3 and 4 make 7.", "7", 1),
        ("numeric_answer", "7 = 3 + 4", "7", 0),
        ("numeric_answer", "The result is \u22127.", "7", 0),
        ("numeric_answer", "The result is \u22127.", "-7", 1),
        ("numeric_answer", "none", "7", 0),
        ("numeric_answer", "1,234.50", "1234.5", 1),
        ("numeric_answer", "12,345,678", "12345678", 1),
        ("numeric_answer", "either 1,2", "12", 0),
        ("numeric_answer", "The point is (3,4)", "4", 1),
        ("numeric_answer", "1,2345", "12345", 0),
        ("numeric_answer(tolerance=0.01)", "100.9", "100", 1),
        ("numeric_answer(tolerance=0.01)", "101.1", "100", 0),
        ("numeric_answer(tolerance=0.01)", "0.009", "0", 1),
        ("numeric_answer", "-0.1e1", "-1", 1),
        ("numeric_answer", "it is .5", "0.5", 1),
        ("numeric_answer", "it is -.5e1.", "-5", 1),
        ("numeric_answer", "it is...5", "5", 1),
        ("numeric_answer", "version 1.2.5", "5", 1),
        ("numeric_answer", "10-5", "5", 1),
        ("numeric_answer", "10-5", "-5", 0),
        ("numeric_answer", "between 3-5", "5", 1),
        ("numeric_answer", "f(x)-5", "5", 1),
        ("numeric_answer", "x = -5", "-5", 1),
        ("numeric_answer", "$-5", "-5", 1),
        ("numeric_answer", "(-5)", "-5", 1),
        ("numeric_answer", "2e-3", "0.002", 1),
        ("numeric_answer", "It costs $7{,}400$ or more.", "7400", 1),
        ("numeric_answer", "12{,}345{,}678", "12345678", 1),
        ("numeric_answer", "\\$7\\,400", "7400", 1),
        ("numeric_answer", "7,\\!400", "7400", 1),
        ("numeric_answer", "7 400 people", "7400", 1),
        ("numeric_answer", "-7 400.5 degrees", "-7400.5", 1),
        ("numeric_answer", "7\u00a0400", "7400", 1),
        ("numeric_answer", "7\u2009400\u2009500 in all", "7400500", 1),
        ("numeric_answer", "7\u202f400", "7 400", 1),
        ("numeric_answer", "12 345", "12345", 1),
        ("numeric_answer", "on page 3 125", "3125", 1),  # ambiguous: one number, as docs/rewards.md says
        ("numeric_answer", "3 4", "4", 1),
        ("numeric_answer", "3 4", "34", 0),
        ("numeric_answer", "3 4 125", "125", 1),
        ("numeric_answer", "1000 200", "200", 1),
        ("numeric_answer", "1 250 30", "30", 1),
        ("numeric_answer", "0 125", "125", 1),
        ("numeric_answer", "H2 125", "125", 1),
        ("numeric_answer", "7\n400", "400", 1),
        ("numeric_answer", "of 3 250,000", "250000", 1),
        ("numeric_answer", "1,250 300", "300", 1),
        ("numeric_answer", "12{,}3", "3", 1),
        ("numeric_answer", "about 4,250,000", "4250000", 1),
        ("numeric_answer", "+3", "3", 1),
        ("numeric_answer", "3", "+3", 1),
        ("numeric_answer", "50%", "50%", 1),
        ("numeric_answer", "50\\%", "50%", 1),
        ("numeric_answer", "Answer: 3", "-3", 0),
        ("numeric_answer", "Answer: -3", "3", 0),
        ("numeric_answer", "-$1,080", "-1080", 1),
        ("numeric_answer", "-$1,080", "1080", 0),
        ("numeric_answer", "- $5", "5", 1),
        ("numeric_answer", "-₹500", "-500", 1),
        ("numeric_answer", "-₹500", "500", 0),
        ("numeric_answer", "12345678901234567", "12345678901234568", 0),
        ("numeric_answer", "12345678901234568", "12,345,678,901,234,568.0", 1),
        ("numeric_answer", "0.1234567890123456789", "0.1234567890123456788", 0),
        ("numeric_answer(tolerance=0.01)", "101", "100", 1),
        ("numeric_answer", "1e99999999999999999999", "7", 0),
        ("numeric_answer", "-1e-99999999999999999999", "0", 1),
        ("numeric_answer", "1_000", "1000", 1),
        ("numeric_answer", "1_00", "100", 0),
        ("numeric_answer", "1'250", "1250", 1),
        ("numeric_answer", "1\u2019250\u2019000.5", "1250000.5", 1),
        ("numeric_answer", "Rs 1,00,000", "100000", 1),
        ("numeric_answer", "12,34,56,789", "123456789", 1),
        ("numeric_answer", "1,00,00", "10000", 0),
        ("numeric_answer", "The answer is \u20135.", "-5", 1),
        ("numeric_answer", "x = \u2212 5", "-5", 1),
        ("numeric_answer", "It is - 5", "5", 0),
        ("numeric_answer", "\uff0d\uff15\uff0e\uff12\uff15", "-5.25", 1),
        ("numeric_answer", "-5", "\u2011 5", 1),
        ("numeric_answer", "1\u200b250", "1250", 1),
        ("numeric_answer", "3\u20135", "5", 1),
        ("numeric_answer", "10 \u2013 5", "5", 1),
        ("numeric_answer", "Total \u2013 5", "5", 1),
        ("numeric_answer", "- 3 pears\n- 5 figs", "5", 1),
        ("math_answer", "\u20135", "-5", 1),
        ("math_answer", "$x = - 5$", "\u2212 5", 1),
        ("math_answer", "- 5", "5", 0),
        ("exact_answer", "\u2212 5.", "-5", 1),
        ("exact_answer", "\uff21\u200bb\u3002", "ab", 1),
        ("exact_answer", "\u200b", "\ufeff", 0),
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
        ("json_valid", '{"a": [1, 2]}', None, 1),
        ("json_valid", '```json\n{"a": 1}\n```', None, 1),
        ("json_valid", "{'a': 1}", None, 0),
        ("json_valid", "NaN", None, 0),
        ("json_valid", "[" * 100_000, None, 0),
        ("json_valid(keys=['a'])", '{"a": 1}', None, 1),
        ("json_valid(keys=['a'])", '["a"]', None, 0),
    ],
)
def test_a_named_reward_judges_the_text_of_a_response(name, completion, answer, expected):
    assert given(name, completion, answer) == pytest.approx(expected)


def test_mathematics_is_compared_by_value():
    pytest.importorskip("math_verify", reason="math-verify comes with the math extra")
    assert given("math_answer", "so it is $\\frac{1}{2}$", "0.5") == 1
    assert given("math_answer", "so it is $x^2 + 2x + 1$", "$(x+1)^2$") == 1
    assert given("math_answer", "so it is $\\frac{1}{3}$", "0.5") == 0
    with pytest.raises(UserError, match=r"math_answer failed with .*not a mathematical expression"):
        given("math_answer", "1", "")


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("(3,4)", "(3,4)", 1),
        ("The point is (3, 4).", "(3,4)", 1),
        ("$(3,4)$", "(3,4)", 1),
        ("(3,4)", "$(3, 4)$", 1),
        ("(4,3)", "(3,4)", 0),
        ("(4,3)", "(6,5)", 0),
        ("$(4,3)$", "(6,5)", 0),
        ("$(4,3)$", "(3,4)", 0),
        ("{3,4}", "(3,4)", 0),
        ("(1/2, 3, 5)", "(0.5,3,5)", 1),
        ("(3, 1/2, 5)", "(0.5,3,5)", 0),
        ("It is {4, 3}.", "{3,4}", 1),
        ("{4, 3}", "\\{3,4\\}", 1),
        ("$\\{4,3\\}$", "{3,4}", 1),
        ("{4, 3, 5}", "{3,4}", 0),
        ("(3,4)", "{3,4}", 0),
        ("f(3,4) = 7", "7", 1),
        ("I do not know.", "(3,4)", 0),
        ("I do not know.", "12", 0),
        ("", "12", 0),
    ],
)
def test_tuples_and_sets_in_plain_text(completion, answer, expected):
    pytest.importorskip("math_verify", reason="math-verify comes with the math extra")
    assert given("math_answer", completion, answer) == expected


@pytest.mark.parametrize(
    "answer",
    [
        "2\\sqrt{3}",
        "2\\pi",
        "1+\\sqrt{2}",
        "\\frac{3}{4}\\pi",
        "1-\\frac{1}{e}",
        "\\ln 2",
        "x^2\\cdot 3",
        "\\infty",
        "\\dfrac{\\pi}{4}",
        "\\frac{a}{b}",
        "\\text{Yes}",
        "\\left(1,2\\right)",
        "[1,\\infty)",
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        "2√3",
        "(-∞, 3)",
        "\\$5",
    ],
)
def test_an_answer_of_bare_tex_is_read_as_a_whole(answer):
    pytest.importorskip("math_verify", reason="math-verify comes with the math extra")
    assert given("math_answer", f"So ${answer}$", answer) == given("math_answer", f"\\boxed{{{answer}}}", answer) == 1
    assert [given("math_answer", f"The answer is {n}.", answer) for n in (1, 2, 3)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("2\\sqrt{3}", "2", 0),
        ("2 \\sqrt 3.", "2\\sqrt{3}", 1),
        ("It is \\frac{1}{2}", "0.5", 1),
        ("The price is $5, so the pair is (1, 2)", "(1,2)", 1),
        ("Of $5 and $6 it is (1, 2)", "(1,2)", 1),
        ("It is (2, 1), or rather $(1, 2)$", "(1,2)", 1),
        ("It is (1, 2), or rather $(2, 1)$", "(1,2)", 0),
        ("(-∞, 3)", "(-\\infty, 3)", 1),
        ("$(-\\infty, 3)$", "(-∞, 3)", 1),
        ("(-∞, 4)", "(-\\infty, 3)", 0),
        ("4000", "4\\,000", 1),
        ("$4\\,000$", "4000", 1),
        ("\\(4\\)", "\\[4\\]", 1),
    ],
)
def test_the_marks_of_mathematics_may_be_missing(completion, answer, expected):
    pytest.importorskip("math_verify", reason="math-verify comes with the math extra")
    assert given("math_answer", completion, answer) == expected


def test_without_its_library_the_way_to_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RuntimeError, match=r"needs the package math-verify: pip install 'rlhf-one-gpu\[math\]'"):
        named_rewards.MathAnswer()(["1"], ["1"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exact", "no reward 'exact'; nearest: exact_answer; known are model, exact_answer, numeric_answer"),
        ("regex", "regex: option pattern is missing"),
        ("regex(pattern='(')", "pattern is not a valid regular expression"),
        ("regex(pattern='a', pattern='b')", "option pattern is given twice"),
        ("regex(pattern=7)", "pattern must be str"),
        ("exact_answer(extract=None)", "extract must be str"),
        ("regex('a')", "is not a reward; write it as"),
        ("length(most=0)", "most must be above 0"),
        ("length(most='3')", "most must be int"),
        ("length(most=True)", "most must be int"),
        ("numeric_answer(tolerance=float('inf'))", "is not a reward; write it as"),
        ("numeric_answer(tolerance='1')", "tolerance must be int or float"),
        ("numeric_answer(tolerance=-1)", "tolerance must be a finite number, 0 or more"),
        ("json_valid(key='a')", "no option 'key'; it has keys"),
        ("json_valid(keys=[1])", "keys must be a list of str"),
        ("json_valid(keys='a')", "keys must be list or tuple"),
        ("regex(**{'a': 1})", "is not a reward; write it as"),
        ("exact_answer(most=1)", "no option 'most'; it has extract"),
        ("__import__('os').system('true')", "is not a reward; write it as"),
        ("no_such_module:f", "cannot be used .ModuleNotFoundError"),
        ("json:no_such_function", "json has no function no_such_function; it has none that can be a reward"),
        ("", "is not a reward; write it as"),
    ],
)
def test_what_is_no_reward_is_refused_in_one_line(name, expected):
    with pytest.raises(UserError, match=rf"^grpo.reward_funcs: .*{expected}") as error:
        rewards.find(name, "grpo.reward_funcs")
    assert "\n" not in str(error.value)


def test_every_option_of_a_named_reward_can_be_written_in_a_recipe():
    options = [p for f in rewards.REGISTRY.values() for p in inspect.signature(f).parameters.values()]
    assert all(option.annotation in rewards.LITERALS for option in options if option.kind is option.KEYWORD_ONLY)


def test_a_module_in_the_current_folder_comes_before_others_of_its_name(tmp_path, monkeypatch):
    for folder, value in (("elsewhere", 1), ("here", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "two_of_a_name.py").write_text(
            f"def f(completions): return [{value}] * len(completions)\n"
        )
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    assert rewards.find("two_of_a_name:f", "here")(["p"], ["a"], [None]) == [2.0]


def test_a_function_of_the_user_s_own_gets_what_it_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rewards.py").write_text(
        "def words(completions): return [len(c.split()) for c in completions]\n"
        "def same(prompts, completions, answer=None, **more):\n"
        "    return [float(p == c) for p, c in zip(prompts, completions)]\n"
        "def bad(completions): return [1 / (len(c) - 3) for c in completions]\n"
        "def nan(completions): return [float('nan') if 'x' in c else 0 for c in completions]\n"
        "def few(completions): return [0.0]\n"
        "def text(completions): return ['1' for _ in completions]\n"
    )
    words = rewards.find("own_rewards:words", "here")
    assert words(["p", "q"], ["a b", "c"], [None, None]) == [2.0, 1.0]
    assert not words.needs_answer and rewards.find("exact_answer", "here").needs_answer
    same = rewards.find("own_rewards:same", "here")
    assert same(["p", "q"], ["p", "r"], [None, None]) == [1.0, 0.0] and not same.needs_answer
    with pytest.raises(
        UserError,
        match=r"^reward own_rewards:bad failed with ZeroDivisionError.*prompt 'second\?' and the response 'abc'$",
    ):
        rewards.find("own_rewards:bad", "here")(["first?", "second?"], ["ab", "abc"], [None, None])
    with pytest.raises(UserError, match=r"^reward own_rewards:nan is nan, not a finite .*'q' and the response 'x'$"):
        rewards.find("own_rewards:nan", "here")(["p", "q"], ["a", "x"], [None, None])
    question = f"{100 * 'Be kind. '}What is 1 + 1?"  # a system prompt is the same for all questions
    with pytest.raises(UserError, match=r"the prompt '….*Be kind\. What is 1 \+ 1\?' and the response 'x'$"):
        rewards.find("own_rewards:nan", "here")([question], ["x"], [None])
    with pytest.raises(UserError, match="returned 1 numbers for 2 responses: return a list with one for each"):
        rewards.find("own_rewards:few", "here")(["p", "q"], ["a", "x"], [None, None])
    with pytest.raises(UserError, match="is '1', not a finite number"):
        rewards.find("own_rewards:text", "here")(["p"], ["a"], [None])


@pytest.mark.parametrize(
    ("signature", "argument"),
    [
        ("def f(completions, ground_truth):", "ground_truth"),
        ("def f(prompts, completions, trainer_state, **kwargs):", "trainer_state"),
        ("def f(completions, *, solution):", "solution"),
        ("def f(completions, /):", "completions"),
        ("async def f(texts):", "texts"),
        ("def f(prompts, completions, log=None, *args, **kwargs):", None),
    ],
)
def test_an_argument_that_no_call_gives_is_refused_before_training(tmp_path, monkeypatch, signature, argument):
    """It would fail at the first step, after SFT and the reward model."""
    (tmp_path / "needs_more.py").write_text(f"{signature}\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    if argument is None:
        assert given("needs_more:f", "text") == 1
        return
    with pytest.raises(UserError, match=f"needs_more:f needs the argument '{argument}'; .* completion_ids, answer,"):
        rewards.find("needs_more:f", "grpo.reward_funcs")


@pytest.mark.parametrize("name", ["my_rewards.py:polite", "./my_rewards.py:polite", "/a folder/my_rewards.py:polite"])
def test_a_file_in_place_of_its_module_gets_the_name_to_write(name):
    with pytest.raises(UserError, match=r"name the module, not its file: my_rewards:polite, with my_rewards\.py in"):
        rewards.find(name, "grpo.reward_funcs")


def test_a_class_in_place_of_a_function_is_refused_before_training():
    with pytest.raises(UserError, match="decimal:Decimal is a class; name a function"):
        rewards.find("decimal:Decimal", "grpo.reward_funcs")


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("dict(enumerate([3.0, 4.0]))", "it returned a dict, not a list of numbers"),
        ("{3.0, 4.0}", "it returned a set, not a list of numbers"),
        ("3.0", "it returned a float, not a list of numbers"),
        ("[3.0, 1e39]", r"is 1e\+39, not a finite number in float32 or None, .* the response 'two'"),
    ],
)
def test_what_would_become_other_numbers_is_refused(tmp_path, monkeypatch, returned, said):
    """The keys of an object were taken for its numbers, and 1e39 became infinite."""
    (tmp_path / "returns.py").write_text(f"def f(completions):\n    return {returned}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        rewards.find("returns:f", "grpo.reward_funcs")(["p", "p"], ["one", "two"], [None, None])


def test_code_of_the_user_s_own_that_exits_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exiting.py").write_text(
        "import sys\n"
        "def f(completions): return [sys.exit('no key') if c == 'x' else 1.0 for c in completions]\n"
        "async def late(completions): sys.exit(3)\n"
    )
    (tmp_path / "exits_at_once.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(
        UserError, match=r"^reward exiting:f failed with SystemExit: no key in exiting.*, for .*'q' and .*'x'$"
    ):
        rewards.find("exiting:f", "here")(["p", "q"], ["a", "x"], [None, None])
    with pytest.raises(
        UserError, match=r"^reward exiting:late failed with SystemExit: 3 in exiting.*, for .*'p' and .*'a'$"
    ):
        rewards.find("exiting:late", "here")(["p"], ["a"], [None])
    with pytest.raises(UserError, match=r"exits_at_once:f cannot be used \(SystemExit: 0 in exits_at_once\.py:\d: "):
        rewards.find("exits_at_once:f", "here")


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
    assert rewards.find("judges:late", "here")(["p", "q"], ["a b", "x"], [None, None]) == [3.0, None]
    with pytest.raises(UserError, match=r"bad failed with ZeroDivisionError.*prompt 'q' and the response ''$"):
        rewards.find("judges:bad", "here")(["p", "q"], ["a", ""], [None, None])
    prompt = (Message("user", "Say it."),)
    changes = {"reward_funcs": ["judges:late", "judges:other"], "reward_weights": [2.0, 0.5], "normalize_scores": False}
    options = grouped("grpo", changes).recipe.online()["grpo"]
    assert isinstance(options, GroupOptions)
    reward_sum = RewardSum("grpo", options, {}, DialogueTokenizer(tokenize.words(300), "hh"))
    by_name = reward_sum.per_response([prompt] * 3, ["ab", "x", "xx"], None, [[0]] * 3)
    assert reward_sum.judged(by_name).tolist() == [True, False, False]
    assert reward_sum.total(by_name).nan_to_num(-1).tolist() == [4.5, -1, -1]
    reward_sum.weights["judges.other"] = 0.0  # measures, and need not judge
    assert reward_sum.total(by_name).nan_to_num(-1).tolist() == [4.0, -1, 4.0]
    assert {name: mean.item() for name, mean in mean_rewards(by_name).items()} == {
        "rewards/judges.late": 2.0,
        "rewards/judges.other": 1.0,
    }
    assert mean_rewards({"none": 0 * by_name["judges.other"][1:2]}) == {}, "no mean, and not 0"


def test_short_names_for_metrics():
    names = ["model", "regex(pattern='a')", "regex(pattern='b')", "own.rewards:polite", "numeric_answer(tolerance=0.1)"]
    assert rewards.labels(names) == ["model", "regex", "regex_2", "own.rewards.polite", "numeric_answer"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_generations": 3}, "must be multiples of num_generations: 3"),
        ({"num_generations": 1}, "greater than or equal to 2"),
        ({"reward_funcs": ["model", "json_valid"], "reward_weights": [1.0]}, "2 reward_funcs and 1 reward_weights"),
        ({"reward_funcs": ["model", "model"]}, "names a reward twice"),
        ({"reward_funcs": ["json_valid"]}, "normalize_scores needs model among reward_funcs"),
        ({"kl_target": 0.1, "beta": 0.0}, "kl_target needs beta above 0"),
        ({"overlong_buffer": 99}, "overlong_buffer is at most max_completion_length"),
        ({"epsilon": 1.5}, "less than 1"),
        ({"loss_type": "gmpo", "importance_sampling_level": "sequence"}, "gmpo needs importance_sampling_level: token"),
        ({"kl_estimator": "k1", "use_bias_correction_kl": False}, "kl_penalty: loss needs kl_estimator k2 or k3"),
        ({"kl_estimator": "k2"}, "kl_estimator: k2 needs use_bias_correction_kl: false"),
    ],
)
def test_impossible_settings_are_refused(changes, expected):
    with pytest.raises(UserError, match=expected):
        grouped("grpo", changes)


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        ("exact_answer", " ", "is empty"),
        ("numeric_answer", "twelve", "'twelve' holds no finite number"),
        ("numeric_answer", "1e999", "'1e999' holds no finite number"),
        ("numeric_answer", "\u20145", "'\u20145' begins with a dash that may be a minus or not"),
        ("exact_answer", "\u200b\u3164", "is empty"),
        ("math_answer", "", "'' is not a mathematical expression"),
    ],
)
def test_answers_that_no_response_can_match_are_refused_before_training(name, answer, expected):
    if name == "math_answer":
        pytest.importorskip("math_verify", reason="math-verify comes with the math extra")
    good, bad = (Message("user", "One?"),), (Message("user", "Twelve?"),)
    options = grouped("grpo", {"reward_funcs": [name], "normalize_scores": False}).recipe.online()["grpo"]
    assert isinstance(options, GroupOptions)
    tokenizer = DialogueTokenizer(tokenize.words(300), "hh")
    assert RewardSum("grpo", options, {good: "1"}, tokenizer).usable(Split([good], [good])).train == [good]
    with pytest.raises(UserError, match=rf"^grpo: {name} .*'.*Twelve\?.*'.*: the answer {expected}") as error:
        RewardSum("grpo", options, {good: "1", bad: answer}, tokenizer).usable(Split([good], [good, bad]))
    assert "\n" not in str(error.value)


def test_an_evaluation_keeps_functions_of_one_name_apart():
    """Both sections call a reward `length`, with another limit each; `exact_answer` is the same in both."""
    prompt = (Message("user", "Say it."),)
    tokenizer = DialogueTokenizer(tokenize.words(300), "hh")
    sections = []
    for stage, most in (("rloo", 3), ("grpo", 60)):
        funcs = [f"length(most={most})", "exact_answer"]
        options = grouped(stage, {"reward_funcs": funcs, "normalize_scores": False}).recipe.online()[stage_name(stage)]
        assert isinstance(options, GroupOptions)
        sections.append(RewardSum(stage_name(stage), options, {prompt: "b"}, tokenizer))
    by_name, _ = _reward_fn(sections)([prompt], ["a b c d e"], None, [[1, 2]])
    assert by_name.keys() == {"rloo.length", "grpo.length", "exact_answer"}
    assert by_name["rloo.length"] != by_name["grpo.length"]
    assert _reward_functions(sections) == {
        "rloo.length": "length(most=3)",
        "grpo.length": "length(most=60)",
        "exact_answer": "exact_answer",
    }


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a module of rewards into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)

    return write


def test_a_call_is_repeated(own):
    """Each try has lists of its own: the first one takes from them before it fails."""
    own(
        "flaky",
        "calls = []\n"
        "def third(completions):\n"
        "    calls.append(len(completions))\n"
        "    if len(calls) % 3: raise ConnectionError(completions.pop())\n"
        "    return map(float, calls[-2:])\n",
    )
    third, two = rewards.find("flaky:third", "here"), (["p", "q"], ["a", "busy"], [None, None])
    assert replace(third, retries=2)(*two) == [2.0, 2.0]
    with pytest.raises(UserError, match="reward flaky:third failed with ConnectionError: busy"):
        third(["p"], ["busy"], [None])


@pytest.mark.parametrize("name", ["sleeps", "waits", "stubborn", "regex(pattern='(a+)+$')"])
def test_a_call_may_not_take_longer(own, name):
    """Its module's state is kept where an interrupt ends it; what ignores that, or holds Python, is killed."""
    own(
        "slow",
        "import asyncio, time\n"
        "calls = []\n"
        "def sleeps(completions):\n"
        "    calls.append(0)\n"
        "    if len(calls) == 1: time.sleep(60)\n"
        "    return [float(len(calls))]\n"
        "async def waits(completions):\n"
        "    calls.append(0)\n"
        "    if len(calls) == 1: await asyncio.gather(asyncio.sleep(60), asyncio.sleep(60))\n"
        "    return [float(len(calls))]\n"
        "def stubborn(completions):\n"
        "    while True:\n"
        "        try: time.sleep(60)\n"
        "        except BaseException: pass\n",
    )
    function = replace(rewards.find(name if "(" in name else f"slow:{name}", "here"), timeout=0.2, retries=1)
    call, start = (["p"], ["a" * 40 + "b"], [None]), time.monotonic()
    if name in ("sleeps", "waits"):
        assert function(*call) == [2.0]
    else:
        with pytest.raises(UserError, match=r"took longer than reward_timeout: 0.2 s in 2 tries, for 1 .*prompt 'p'"):
            function(*call)
    assert time.monotonic() - start < 10
    assert rewards.find("length(most=9)", "here")(*call) == [0.0], "the next call starts a new process"


def test_a_recipe_sets_timeout_and_retries():
    changes = {"reward_funcs": ["json_valid"], "normalize_scores": False, "reward_timeout": 3, "reward_retries": 2}
    options = grouped("grpo", changes).recipe.online()["grpo"]
    assert isinstance(options, GroupOptions)
    function = RewardSum("grpo", options, {}, DialogueTokenizer(tokenize.words(300), "hh")).functions["json_valid"]
    assert function is not None and (function.timeout, function.retries) == (3.0, 2)


def test_lengths_are_of_words_or_of_tokens(own):
    texts, ids = ["a b c", "a b c"], [[5, 6, 7, 2], [5] * 6]
    for name, expected in (
        ("length(most=4)", [0.0, 0.0]),
        ("length(most=4, unit='tokens')", [0.0, -0.5]),
        ("length(most=2, unit='words')", [-0.5, -0.5]),
    ):
        assert rewards.find(name, "here")(["p", "p"], texts, [None, None], ids) == expected
    with pytest.raises(UserError, match="unit must be 'words' or 'tokens'"):
        rewards.find("length(most=4, unit='bytes')", "here")
    own("counts", "def tokens(completion_ids, **_): return [len(ids) for ids in completion_ids]\n")
    assert rewards.find("counts:tokens", "here")(["p", "p"], texts, [None, None], ids) == [4.0, 6.0]
