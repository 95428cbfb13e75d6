"""The process of the user's own functions: what its code may do there, and which modules it finds."""

import os
import signal
from dataclasses import replace

import pytest

from rlhf.errors import UserError
from rlhf.process import endings
from rlhf.process.guest.host import Guest, end_all
from rlhf.stages.online.reward_call import RewardFunction
from rlhf.stages.online.reward_functions import find
from rlhf.stages.online.reward_sum import total_figures
from tests.helpers import wait_until

LIBRARY = """
def is_there(name):
    import importlib.util
    return importlib.util.find_spec(name) is not None

def of(name):
    try: return __import__(name)
    except ImportError: return None
"""
# A library finds libraries, and the user's modules find what stands beside them, both in one process. `yaml` is
# installed, `statistics` is Python's own, `not_installed` is neither, and `notes` is a folder without modules.
USER = """
import library
import {name}, tools.words
from tools import words as same
import {name} as helper
assert tools.words is same and same.helper is helper and helper.OWN
def f(completions):
    import importlib, multiprocessing, pickle
    from concurrent.futures import ProcessPoolExecutor
    assert not hasattr(library.of("{name}"), "OWN"), "a library found the user's module"
    assert library.is_there("{name}") == {installed}
    assert importlib.import_module("tools.words").TWICE(1) == 2
    assert pickle.loads(pickle.dumps(helper.Mark(3))).value == 3
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [*pool.map(same.TWICE, map(len, completions))]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "rewards"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    end_all()


def written(folder, code: str) -> RewardFunction:
    (folder / "mine.py").write_text(code)
    return find("mine:f", "here")


@pytest.mark.parametrize(("name", "installed"), [("yaml", True), ("statistics", True), ("not_installed", False)])
def test_a_module_beside_the_rewards_is_the_users_and_never_a_librarys(folder, monkeypatch, name, installed):
    (folder.parent / "installed").mkdir()
    (folder.parent / "installed/library.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent / "installed"))
    (folder / f"{name}.py").write_text("class Mark:\n    def __init__(self, value): self.value = value\nOWN = True\n")
    (folder / "tools").mkdir()
    (folder / "tools/__init__.py").write_text("from . import words\n")
    (folder / "tools/words.py").write_text(f"import {name} as helper\ndef TWICE(n): return 2 * n\n")
    (folder / "json").mkdir()  # as a folder of data files, which hides no module
    assert written(folder, USER.format(name=name, installed=installed))(["p"], ["abc"], [None]) == [6.0]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os._exit(7)", "EndOfProcess: its process ended with exit code 7"),
        ("os.kill(os.getpid(), 11)", "EndOfProcess: its process was killed by SIGSEGV"),
        ("os.closerange(3, 100)", "EndOfProcess: its process"),
        ("os.fork() or sys.exit(1); os.wait(); raise KeyError(1)", "KeyError: 1"),
        ("os.fork() or 1 / 0; os._exit(3)", "EndOfProcess: its process ended with exit code 3"),
        ("raise type('Odd', (Exception,), {'__str__': None})", "Odd: "),
    ],
)
def test_an_end_of_the_users_code_is_one_line(folder, code, said):
    function = written(folder, f"import os, sys\ndef f(completions): {code}\n")
    with pytest.raises(UserError, match=rf"^reward mine:f failed with {said}.*, for the prompt 'p'") as error:
        function(["p"], ["a"], [None])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "def f(completions):\n    return [1 / 0]",
            "ZeroDivisionError: division by zero in mine.py:2: return .1 / 0",
        ),
        ("import json\ndef f(completions): json.loads('')", "JSONDecodeError: .* in mine.py:2: def f.*"),
        ("import helper\nasync def f(completions):\n    helper.of({})", "KeyError: 'no' in helper.py:1: of = .*"),
        ("from json import *\nf = lambda completions: loads('')", "JSONDecodeError: .* in mine.py:2: f = lambda.*"),
        ("def f(completions): return [1.0", r"SyntaxError: .* in mine.py:1: def f.*; modules"),
        ("import nothing_of_it", "ModuleNotFoundError: .*'nothing_of_it' in mine.py:1: import nothing_of_it.; modules"),
        (
            "from helper import no",
            "ImportError: .* 'no' from 'helper' .* in mine.py:1: from.*; modules",
        ),
        ("import helper\ndef f(completions): return [helper.Odd()]", "is <helper.Odd object at 0x.*>, not a finite"),
    ],
)
def test_an_error_of_the_users_code_has_its_file_its_line_and_its_text(folder, code, said):
    (folder / "helper.py").write_text("of = lambda row: row['no']\nclass Odd: pass\n")
    with pytest.raises(UserError, match=said) as error:
        written(folder, code)(["p"], ["a"], [None])
    assert "rlhf." not in str(error.value)


OTHERS = """
import math
from functools import partial
from helper import shared, Odd
f = 3
def fair(completions): return [1.0]
def unfair(completions, rules): return [1.0]
def _hidden(completions): return [1.0]
class Kind:
    def __call__(self, completions): return [1.0]
kind, odd = Kind(), Odd()
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("g = 1", "mine has no function f; it has none that can be a reward"),
        (OTHERS, "mine has no function f; nearest: fair; it has shared, fair, kind$"),
        ("def other(answer): pass", "mine has no function f; it has other$"),
        ("".join(f"def g{n}(**_): pass\n" for n in range(11)), "mine has no function f; it has g0, .*, g7 and 3 more$"),
    ],
)
def test_a_function_that_the_module_lacks_is_answered_with_those_that_it_has(folder, code, said):
    """Not with classes, hidden names, or what no call of a reward could be; a number is no function."""
    odd = "class Odd:\n    def __getattr__(self, name): raise OSError(name)\n"
    (folder / "helper.py").write_text(f"{odd}def shared(completions): return [1.0]\n")
    with pytest.raises(UserError, match=f"^here: mine:f: {said}"):
        written(folder, code)
    with pytest.raises(UserError, match=f"No module named 'mien'.*looked for in {folder} first, where mine is$"):
        find("mien:f", "here")


def test_an_error_of_an_installed_module_has_its_line_too(folder, monkeypatch):
    (folder.parent / "theirs.py").write_text("def f(completions):\n    return [completions[1]]\n")
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    with pytest.raises(UserError, match=r"IndexError: list index out of range in .*/theirs\.py:2: return \[compl"):
        find("theirs:f", "here")(["p"], ["a"], [None])


def test_a_process_that_ended_is_replaced(folder):
    code = "import os\ndef f(completions):\n    try: os.mkdir('there')\n"
    code += "    except OSError: return [1.0]\n    os._exit(1)\n"
    assert replace(written(folder, code), retries=1)(["p"], ["a"], [None]) == [1.0]


def test_the_start_of_a_process_is_no_part_of_the_time_of_a_call(folder):
    code = "import os, signal, time\nagain = os.path.exists('there')\ntime.sleep(again)\ndef f(completions):\n"
    code += "    if again: return [1.0]\n    os.mkdir('there')\n"
    code += "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # a call that nothing but a kill ends\n"
    code += "    time.sleep(60)\n"
    assert replace(written(folder, code), timeout=0.5, retries=1)(["p"], ["a"], [None]) == [1.0]


def test_one_event_loop_lives_as_long_as_the_run(folder):
    code = "import asyncio\ngate = asyncio.Semaphore(1)\n"
    code += "async def one(text):\n    async with gate: return await asyncio.sleep(0.001, float(len(text)))\n"
    code += "async def f(completions): return await asyncio.gather(*map(one, completions))\n"
    function = written(folder, code)
    assert function(["p"] * 2, ["a", "bb"], [None] * 2) == function(["p"] * 2, ["a", "bb"], [None] * 2) == [1.0, 2.0]


def test_random_numbers_of_a_reward_begin_with_its_seed(folder):
    code = "import random, numpy as np\ndef f(completions): return [random.random() + np.random.rand()]\n"
    function = written(folder, code)
    first, again, other = (function(["p"], ["a"], [None], seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_a_users_object_may_have_the_methods_of_a_named_reward(folder):
    """`open` gets folder and limits, so that no other limit holds; `figures` counts, `answer_fault` judges answers."""
    code = "class Kept:\n    calls = 0\n"
    code += "    def __call__(self, completions, answer):\n        self.calls += 1\n        return [self.limits[1]]\n"
    code += "    def open(self, folder, timeout, retries): self.limits = str(folder), timeout, retries\n"
    code += "    def figures(self): return {'calls': self.calls, 'letters': len(self.limits[0])}\n"
    code += "    def answer_fault(self, answer): return 'is short' if len(answer) < 2 else None\n"
    function = written(folder, code + "f = Kept()\n").opened(folder, 0.5, 3)
    assert (function.timeout, function.retries, function.needs_answer) == (None, 0, True)
    assert function(["p"], ["a"], ["42"]) == [0.5]
    assert total_figures([function, function]) == {"calls": 2, "letters": 2 * len(str(folder))}
    assert function.answer_faults(["42", "7"]) == [None, "is short"]


def test_math_answer_has_a_time_limit():
    """math-verify sets an alarm, which Python allows in a main thread alone."""
    pytest.importorskip("math_verify", reason="math-verify comes with the math extra")
    function = replace(find("math_answer", "here"), timeout=30.0)
    assert function(["p"], [r"It is $\frac{1}{2}$"], ["1/2"]) == [1.0]


def test_the_guests_children_end_with_it(folder):
    before = {*endings._descendants(os.getpid())}
    function = written(
        folder, "import subprocess\ndef f(completions):\n    subprocess.Popen(['sleep', '60'])\n    return [0]\n"
    )
    assert function(["p"], ["a"], [None]) == [0.0]
    started = {*endings._descendants(os.getpid())} - before
    assert len(started) == 2 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    end_all()
    wait_until(lambda: not any(map(_runs, started)), "a child of the guest is still there")


def _runs(process: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_guest_whose_last_reply_nobody_reads_ends_without_a_word(capfd):
    guest = Guest()
    assert guest.ask(os.getpid) != os.getpid()
    guest.keep(os.getcwd)
    assert guest._connection.poll(10), "the reply is here, and is not read"
    guest.end()
    assert capfd.readouterr().err == ""
