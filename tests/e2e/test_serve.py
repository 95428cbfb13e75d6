"""`rlhf serve`: the real openai client against the merged model of a small chain."""

import json
import os
import shlex
import shutil
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

from rlhf.commands import serve
from rlhf.data.rows import Message
from rlhf.data.transcripts import render_hh
from rlhf.errors import OptionError, UserError
from rlhf.recipe import as_yaml
from tests.helpers import RECIPE, SMALL, beside, free_port, rlhf, run_stages, small

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
    command += ["--engine", "transformers"]
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
    log = (done / "log").read_text()
    assert log.index("loading cpu-tiny/v1/merge/model") < log.index(
        'serving as model "cpu-tiny/v1/merge/model" at http://127.0.0.1:'
    )
    server.send_signal(signal.SIGINT)
    assert server.wait(20) == 0
    assert (done / "log").read_text().endswith("stopped serving cpu-tiny/v1/merge/model\n")
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


def test_answers_stream_and_a_seed_repeats_them(client):
    def stream() -> str:
        parts = client.chat.completions.create(model=NAME, messages=SAID, max_tokens=6, seed=3, stream=True)
        return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)

    assert stream() == stream() != ""


def test_a_template_writes_what_training_wrote(done):
    tokenizer = AutoTokenizer.from_pretrained(done / NAME)
    for said in (SAID, SAID[1:], [*SAID, {"role": "assistant", "content": "Hi.\n"}, SAID[1]]):
        written = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        assert written == tokenizer.bos_token + render_hh([Message(row["role"], row["content"]) for row in said])
    with pytest.raises(Exception, match="only the first message"):
        tokenizer.apply_chat_template([*SAID, SAID[0]], tokenize=False)


def test_weights_may_be_read_by_whoever_may_read_the_other_files(done):
    """A server may run under another user, and safetensors writes for its own user alone."""
    for folder in ("merge/model", "sft/adapter", "pretrain/model"):
        files = [file for file in (done / "cpu-tiny/v1" / folder).iterdir() if file.is_file()]
        assert any(file.suffix == ".safetensors" for file in files)
        assert len({file.stat().st_mode for file in files}) == 1, folder


def test_the_merged_model_samples_as_it_was_evaluated(done):
    found = GenerationConfig.from_pretrained(done / NAME)
    options = small().recipe.evaluate
    assert (found.do_sample, found.temperature, found.top_p, found.top_k) == (
        True,
        options.temperature,
        options.top_p,
        0,
    )


def test_what_is_missing_is_said(done, tmp_path, monkeypatch, capsys):
    code, _, err = rlhf(monkeypatch, capsys, "serve", "--hw", "cpu", "--out", str(tmp_path))
    assert code == 1 and "serve needs merge, which has not been run" in err
    assert f"first `rlhf run merge --hw cpu --out {tmp_path} --with-parents`\n" in err
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"vllm is not installed here; .* leave out --engine vllm$"):
        serve.vllm_program("vllm", [])
    with pytest.raises(UserError, match=r"vllm is not installed here; .* leave out the options after --$"):
        serve.vllm_program("auto", ["--max-model-len", "64"])
    with pytest.raises(OptionError, match="--max-model-len 64: only vLLM takes options after --"):
        serve.vllm_program("transformers", ["--max-model-len", "64"])


SERVER = """
import http.server, sys, time
time.sleep(1)
print("up", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


@pytest.fixture
def port():
    return free_port()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serving_is_said_when_the_server_listens_and_its_end_when_it_has_ended(tmp_path, port, number):
    server = f"[sys.executable, '-c', {SERVER!r}, '{port}']"
    where = f"Path({str(tmp_path)!r}), 'm', '127.0.0.1', {port}"
    code = (
        "import sys; from pathlib import Path; from rlhf.process import endings; from rlhf.commands import serve\n"
        f"with endings.listening(): serve.serve({server}, {where})"
    )
    ours = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert ours.stderr is not None
    assert ours.stderr.readline() == f"loading m; it will answer at http://127.0.0.1:{port}/v1\n"
    assert not serve._listens("127.0.0.1", port)
    assert ours.stderr.readline() == f'serving as model "m" at http://127.0.0.1:{port}/v1; Ctrl-C ends it\n'
    assert ours.stderr.readline() == f"try it: {serve.request('m', f'http://127.0.0.1:{port}/v1')}\n"
    assert serve._listens("127.0.0.1", port)
    ours.send_signal(number)
    assert ours.communicate(timeout=30)[1] == "stopping the server\nstopped serving m\n"
    assert ours.returncode == 0 and not serve._listens("127.0.0.1", port)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_printed_request_gets_an_answer(client, done):
    (line,) = [line for line in (done / "log").read_text().splitlines() if line.startswith("try it: ")]
    answer = subprocess.run(shlex.split(line.removeprefix("try it: ")), capture_output=True, text=True, timeout=60)
    assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant", answer


def test_a_server_that_ends_by_itself_is_an_error(tmp_path, port):
    with pytest.raises(UserError, match="the server ended with exit code 3"):
        serve.serve([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, "m", "127.0.0.1", port)


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(done):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {number} of 127.0.0.1 is in use: choose another --port"):
            serve.run(small(merge__stage="sft"), done, "transformers", "127.0.0.1", number)


def test_a_model_that_was_merged_in_another_root_is_served_from_there(done, tmp_path, monkeypatch):
    started: list[tuple[Path, str]] = []
    monkeypatch.setattr(serve, "serve", lambda command, folder, model, *address: started.append((folder, model)))
    serve.run(small(merge__stage="sft"), tmp_path, "transformers", "127.0.0.1", 8123, reuse=done)
    ((folder, model),) = started
    assert folder == done and (done / model / "config.json").exists()


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A command vllm whose server cannot start."""
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return str(program)


def test_vllm_serves_where_it_is_installed(vllm):
    assert serve.vllm_program("auto", []) == serve.vllm_program("vllm", ["--x"]) == vllm
    assert serve.vllm_program("transformers", []) is None
    assert serve.vllm_command(vllm, "a/model", "float32", "127.0.0.1", 8001, ["--dtype", "half"]) == [
        *[vllm, "serve", "a/model", "--served-model-name", "a/model", "--host", "127.0.0.1", "--port", "8001"],
        *["--dtype", "float32", "--dtype", "half"],
    ]
    assert serve.transformers_command("a/model", "cuda", "127.0.0.1", 8001)[0] == sys.executable


def test_where_vllm_does_not_start_transformers_serves_unless_vllm_was_asked_for(done, vllm, port, monkeypatch, capsys):
    merged, again = small(merge__stage="sft"), [sys.executable, "-c", "raise SystemExit(4)"]
    monkeypatch.setattr(serve, "transformers_command", lambda *_: again)
    with pytest.raises(UserError, match="exit code 4"):
        serve.run(merged, done, "auto", "127.0.0.1", port)
    said = capsys.readouterr().err
    assert "exit code 3 before it served; its message is above. Going on with transformers' server" in said
    assert serve.LIMITS in said
    asked: tuple[tuple[serve.Engine, list[str]], ...] = (("vllm", []), ("auto", ["--max-model-len", "64"]))
    for engine, options in asked:
        with pytest.raises(serve.NotStarted, match="exit code 3"):
            serve.run(merged, done, engine, "127.0.0.1", port, None, options)


def test_options_after_two_hyphens_are_passed_on(done, tmp_path, monkeypatch, capsys):
    passed: list[Any] = []
    monkeypatch.setattr(serve, "run", lambda *arguments: passed.append(arguments[-1]))
    own = ["--hw", "cpu", "--out", str(done)]
    for chosen in (own, [str(done / "cpu-tiny/v1")]):
        for rest in ([], ["--"], ["--", "--max-model-len", "64"]):
            code, _, err = rlhf(monkeypatch, capsys, "serve", *chosen, *rest)
            assert code == 0, err
    assert passed == [[], [], ["--max-model-len", "64"]] * 2
