"""`rlhf serve`: the real openai client against the merged model of a small chain."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlhf.data.rows import Message
from rlhf.data.transcripts import render_hh
from rlhf.recipe import as_yaml
from tests.helpers import RECIPE, SMALL, beside, rlhf, run_stages, small

openai = pytest.importorskip("openai", reason="the server needs transformers[serving]")
ROOT = Path(__file__).parents[2]
OPTIONS = [part for key, value in SMALL.items() for part in ("--set", f"{key}={as_yaml(value)}")]
OPTIONS += ["--recipe", str(RECIPE), "--set", "merge.stage=sft"]


@pytest.fixture(scope="module")
def done(trained, tmp_path_factory):
    out = beside(trained, tmp_path_factory.mktemp("serve"), "pretrain", "sft")
    run_stages(small(merge__stage="sft"), out, "merge")
    return out


@pytest.fixture(scope="module")
def client(done):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "rlhf.cli", "serve", *OPTIONS, "--out", str(done), "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(done / "hub")}
    with open(done / "log", "w") as log:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    for _ in range(240):
        try:
            client.models.list()
            break
        except openai.APIConnectionError:
            assert server.poll() is None, (done / "log").read_text()
            time.sleep(0.5)
    yield client
    assert f"cd {done} && {sys.executable} -P -m " in (done / "log").read_text()
    server.send_signal(signal.SIGINT)  # the server itself gets it
    server.wait(20)
    with socket.socket() as gone, pytest.raises(ConnectionError):
        gone.connect(("127.0.0.1", port))


NAME = "cpu-tiny/v1/merge/model"
SAID: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello there"}]


def expected(done: Path, tokens: int) -> tuple[str, int]:
    """The merged model's likeliest answer to SAID, and the tokens of the prompt."""
    folder = done / NAME
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = render_hh([Message(row["role"], row["content"]) for row in SAID])
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for _ in range(tokens):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], -1)
    answer = tokenizer.decode(ids[0, -tokens:], skip_special_tokens=True)
    assert isinstance(answer, str)
    return answer, ids.shape[1] - tokens


def test_the_likeliest_answer_is_the_models_own(done, client):
    text, prompt_tokens = expected(done, 6)
    answer = client.chat.completions.create(model=NAME, messages=SAID, max_tokens=6, temperature=0)
    assert answer.choices[0].message.content == text
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, 6)


def test_the_merged_model_samples_as_it_was_evaluated(done):
    found = GenerationConfig.from_pretrained(done / NAME)
    options = small().recipe.evaluate
    assert (found.do_sample, found.temperature, found.top_p, found.top_k) == (
        True,
        options.temperature,
        options.top_p,
        0,
    )


@pytest.fixture
def started(monkeypatch, capsys):
    """The folder and the words of the server that a command line starts, and what is printed before."""

    def of(*words: object) -> tuple[Path, list[str], str]:
        seen: list[tuple[Path, list[str]]] = []
        monkeypatch.setattr(os, "execvp", lambda _, words: seen.append((Path.cwd(), words)))
        monkeypatch.chdir(ROOT)  # and back, whatever the command does
        code, _, err = rlhf(monkeypatch, capsys, "serve", *words)
        assert code == 0, err
        ((folder, command),) = seen
        return folder, command, err

    return of


def test_vllm_serves_where_it_is_installed(done, tmp_path, monkeypatch, started):
    (tmp_path / "vllm").touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    _, words, said = started(done / "cpu-tiny/v1", "--port", 8001)
    served = ["vllm", "serve", NAME, "--served-model-name", NAME, "--dtype", "float32"]
    assert words == [*served, "--host", "127.0.0.1", "--port", "8001"]
    assert said.endswith(f"cd {done} && {shlex.join(words)}\n")
