"""Signals, as a command meets them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

from rlhf.process import endings
from rlhf.process.endings import Stopped
from tests.helpers import not_none, wait_until

NAMES = [number.name for number in endings.SIGNALS]


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_raises_in_the_main_thread_and_names_what_is_kept(name):
    number = signal.Signals[name]
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught, endings.listening(), endings.reporting_progress(lambda: "step 4 is kept"):
        os.kill(os.getpid(), number)
        time.sleep(5)
    assert caught.value.number == number
    assert str(caught.value) == ("stopped" if name == "SIGINT" else f"stopped by {name}") + "; step 4 is kept"
    assert signal.getsignal(number) == before, "handlers are as they were"


def test_what_is_kept_is_forgotten_when_the_stage_is_over():
    with pytest.raises(Stopped) as caught, endings.listening():
        with endings.reporting_progress(lambda: "old"):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert caught.value.progress == ""


def test_an_ignored_signal_stays_ignored():
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with endings.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_forked_worker_dies_of_a_signal_and_its_parent_does_not_hear_of_it():
    with endings.listening():
        worker = os.fork()
        if not worker:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
        time.sleep(0.05)


def has_taken(process: "subprocess.Popen[str]", number: int) -> bool:
    """Whether a process has ended, or has been interrupted by a signal that was sent to it."""
    if process.poll() is not None:
        return True
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return not any(signals >> (number - 1) & 1 for signals in pending)


def script(body: str, *signals: int) -> tuple[int, str, float]:
    """Exit code and stderr of a program that is sent signals once it has printed "ready", and how long it lived on."""
    imports = "import hashlib, subprocess, sys, threading, time\nfrom rlhf.process import children, endings\n"
    code = imports + textwrap.dedent(body)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "ready"
    began = time.monotonic()
    for number in signals:
        process.send_signal(number)
        wait_until(partial(has_taken, process, number))
    try:
        _, err = process.communicate()
    finally:
        process.kill()
    return process.returncode, err, time.monotonic() - began


def test_a_second_signal_ends_a_long_goodbye():
    body = """
    with endings.listening():
        try:
            print("ready", flush=True)
            time.sleep(600)
        finally:
            time.sleep(600)
    """
    code, err, seconds = script(body, signal.SIGTERM, signal.SIGTERM)
    assert (code, err) == (-signal.SIGTERM, "") and seconds < 20


def test_a_child_that_runs_for_us_is_told_and_has_its_say():
    body = """
    child = "import time\\nfrom rlhf.process import endings\\n"
    child += "try:\\n with endings.listening():\\n  print('ready', flush=True)"
    child += "\\n  time.sleep(600)\\nexcept endings.Stopped as stop:\\n raise SystemExit(f'child: {stop}')"
    try:
        with endings.listening():
            children.run_child([sys.executable, "-c", child])
    except endings.Stopped as stop:
        sys.exit(f"parent: {stop}")
    """
    _, err, _ = script(body, signal.SIGTERM)
    assert err == "child: stopped by SIGTERM\nparent: stopped by SIGTERM\n"


CHILD = """
import sys, time
from rlhf.process import endings
try:
    with endings.listening():
        try:
            print("ready", flush=True)
            time.sleep(600)
        finally:
            time.sleep(1)  # a second signal would end it here
            print("child: files are closed", file=sys.stderr, flush=True)
except endings.Stopped as stop:
    sys.exit(f"child: {stop}")
"""
PARENT = f"""
import sys
from rlhf.process import children, endings
try:
    with endings.listening():
        children.run_child([sys.executable, "-c", {CHILD!r}])
except endings.Stopped as stop:
    sys.exit(f"parent: {{stop}}")
"""


def test_a_signal_that_a_terminal_sends_to_both_is_not_sent_to_the_child_again():
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert not_none(process.stdout).readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate()
    assert err == "child: files are closed\nchild: stopped\nparent: stopped\n"


def test_a_child_that_ignores_the_signal_is_killed():
    body = """
    endings.PATIENCE = 0.2
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)"
    try:
        with endings.listening():
            children.run_child([sys.executable, "-c", child + "; time.sleep(600)"])
    except endings.Stopped as stop:
        sys.exit(f"parent: {stop}")
    """
    _, err, seconds = script(body, signal.SIGTERM)
    assert err == "parent: stopped by SIGTERM\n" and seconds < 20
