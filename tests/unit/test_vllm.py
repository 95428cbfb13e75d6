"""The vLLM client against a server of the same endpoints, whose model is one of ours."""

import json
import math
import os
import re
import threading
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rlhf.data.batch import Rollout
from rlhf.errors import UserError
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.models.shared_base import SharedBase
from rlhf.observe.watch import mismatch_limit
from rlhf.recipe.schema_online import Ppo
from rlhf.rollout.check import check_first
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.vllm import Client
from rlhf.run.directory import StageRun
from rlhf.stages.online import role_passes, session
from rlhf.stages.online.session import Session
from tests.helpers import beside, grouped, not_none, noted, run_stages, small
from tests.lines import read_intact_lines
from tests.rollouts import made_up_rollout


class Ids:
    pad_id, eos_id = 0, 2


class Fake(ThreadingHTTPServer):
    """Answers with tokens that name the prompt, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.loaded: set[str] = set()
        self.known: set[str] = set()
        self.modes: set[int] = set()  # of the weights that were loaded
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Fake

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer(200, {"data": []})

    def do_POST(self):
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, content))
        if self.path == "/v1/load_lora_adapter":
            if not (Path(content["lora_path"]) / "adapter_model.safetensors").is_file():
                return self.answer(404, {"error": {"message": "No adapter found"}})
            assert content["lora_name"] not in self.server.known, "the server remembers every name"
            self.server.known.add(content["lora_name"])
            self.server.loaded.add(content["lora_name"])
            self.server.modes.add((Path(content["lora_path"]) / "adapter_model.safetensors").stat().st_mode & 0o777)
            return self.answer(200, "Success: LoRA adapter added.")
        if self.path == "/v1/unload_lora_adapter":
            self.server.loaded.remove(content["lora_name"])
            return self.answer(200, "Success: LoRA adapter removed.")
        if content["model"] not in self.server.loaded:
            return self.answer(404, {"error": {"message": "no such model"}})
        new = [content["prompt"][-1]] * (len(content["prompt"]) % content["max_tokens"]) + [2]
        choice = {"token_ids": new, "logprobs": {"token_logprobs": [-0.5] * len(new)}}
        return self.answer(200, {"choices": [choice]})

    def answer(self, status: int, content):
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def fake():
    server = Fake()
    yield server
    server.shutdown()


def client_of(url: str) -> Client:
    return Client(url, lambda: "vllm serve BASE")


def test_responses_come_back_in_order_with_their_log_probabilities(fake, tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    client = client_of(fake.url)
    prompts = [[1] * n + [10 + n] for n in (5, 1, 3, 2)]
    with client.adapter(tmp_path):
        rollout = client.sample(prompts, Ids(), Sampling(64, 8, 0.7, 2))
    assert not fake.loaded
    for row, prompt in enumerate(prompts):
        assert rollout.tokens[row][rollout.mask[row]].tolist() == [prompt[-1]] * len(prompt) + [2]
    assert rollout.ended.all()
    assert rollout.logprobs is not None
    assert torch.equal(rollout.logprobs[rollout.mask], torch.full((int(rollout.mask.sum()),), -0.5))
    asked = [content for path, content in fake.asked if path == "/v1/completions"]
    assert {tuple(content["prompt"]) for content in asked} == {tuple(p) for p in prompts}
    assert len({content["seed"] for content in asked}) == 4
    assert {(content["temperature"], content["max_tokens"]) for content in asked} == {(0.7, 8)}
    for content in asked:  # nothing that a generation_config.json may set is left to the server
        assert (content["top_p"], content["top_k"], content["min_p"], content["repetition_penalty"]) == (1, -1, 0, 1)
        assert content["ignore_eos"] and content["stop_token_ids"] == [2]


@pytest.fixture
def unchecked(monkeypatch):
    """A server that says -0.5 to every token is taken for one that serves the policy."""
    monkeypatch.setattr(session, "check_first", lambda *_: None)


def test_a_server_of_something_else_is_refused_in_the_first_step(fake, trained, tmp_path):
    out = beside(trained, tmp_path, "pretrain", "sft", "rm")
    base = re.escape(str((out / "cpu-tiny/v1/pretrain/model").resolve()))
    settings = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_CPU_KVCACHE_SPACE=1"
    command = f"{settings} vllm serve {base} --host 127.0.0.1 --port .* --dtype float32 .*[0-9]`"
    with pytest.raises(UserError, match=f"does not serve the policy: .* may by 0.02: start one with: `{command}"):
        run_stages(small(ppo__vllm_url=fake.url, ppo__steps=3), out, "ppo")
    assert not (out / "cpu-tiny/v1/ppo/checkpoints").exists() and not fake.loaded


@pytest.mark.parametrize(("noise", "refused"), [(1e-5, False), (0.05, True), (math.nan, True)])
def test_a_served_policy_is_compared_with_the_trained_one(trained, noise, refused):
    loaded = small(ppo__vllm_url="http://x")
    run, options = StageRun(trained, loaded, "ppo"), loaded.recipe.options(Ppo)
    sft = run.require("sft") / "adapter"
    shared = SharedBase(
        load_base(run.base, torch.device("cpu")), {"policy": sft, "reference": sft}, trainable=("policy",)
    )
    rollout = made_up_rollout([[1, 7, 8, 9]] * 8, load_tokenizer(run.base), torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = role_passes.logprobs(shared, "policy", rollout, options)
    served = replace(rollout, logprobs=own + noise)
    with pytest.raises(UserError, match="does not serve the policy") if refused else nullcontext():
        server = Mock(url=options.vllm_url)
        sampling, limit = session.sampling_settings(options), mismatch_limit(loaded.recipe.model, served=True)
        with shared.role("policy"):
            check_first(shared, served, sampling, server, limit)


@pytest.fixture
def umask():
    """Files are for everyone to read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_ppo_samples_with_the_policy_of_each_step(fake, trained, tmp_path, umask, unchecked):
    out = beside(trained, tmp_path, "pretrain", "sft", "rm")
    run_stages(small(ppo__vllm_url=fake.url, ppo__steps=3), out, "ppo")
    assert len(fake.known) >= 3
    assert not fake.loaded
    rows = read_intact_lines(out / "cpu-tiny/v1/ppo/metrics.jsonl")
    assert all(row["rollout/logprob_diff_max"] > 0.1 for row in rows)  # that server says -0.5 to everything
    assert fake.modes == {0o644}, "a server of another user reads the adapters"
    assert not (out / "cpu-tiny/v1/ppo/sampling.tmp").exists()


def test_a_server_that_dies_leaves_a_run_that_says_how_it_goes_on(fake, trained, tmp_path, monkeypatch, unchecked):
    sample = Client.sample

    def dying(self: Client, *arguments: Any) -> Rollout:
        if (out / "cpu-tiny/v1/ppo/checkpoints/step-000002").exists():
            self.url = "http://127.0.0.1:9"
        return sample(self, *arguments)

    monkeypatch.setattr(Client, "sample", dying)
    out = beside(trained, tmp_path, "pretrain", "sft", "rm")
    loaded = small(ppo__vllm_url=fake.url, ppo__steps=3, ppo__save_steps=2, ppo__eval_steps=2)
    kept = r"step-000002 is kept: .*--resume.* continues from it"
    with pytest.raises(UserError, match=f"no vLLM server answers at http://127.0.0.1:9 .*{kept}"):
        run_stages(loaded, out, "ppo")
    assert not (out / "cpu-tiny/v1/ppo/sampling.tmp").exists()
    monkeypatch.setattr(Client, "sample", sample)
    assert run_stages(loaded, out, "ppo", resume=True)["status"] == "done"


def test_responses_to_one_prompt_share_its_computation(fake, trained, tmp_path, monkeypatch, unchecked):
    """Of two prompts with four responses each: the lean trunk computes each of them once."""
    numbers: list[list[int]] = []
    sample = Session.sample

    def noting(self: Session, *arguments: Any) -> Rollout:
        rollout = sample(self, *arguments)
        return noted(numbers, not_none(rollout.prompt_numbers).tolist(), rollout)

    monkeypatch.setattr(Session, "sample", noting)
    out = beside(trained, tmp_path, "pretrain", "sft", "rm")
    run_stages(grouped("grpo", {"vllm_url": fake.url, "steps": 1}, hardware__trunk="lean"), out, "grpo")
    assert numbers[-1] == [0, 0, 0, 0, 1, 1, 1, 1]


def with_nothing(client: Client, folder: Path) -> None:
    with client.adapter(folder / "nowhere"):
        pass


def test_a_server_that_is_not_there_or_refuses_is_one_line(fake, tmp_path):
    with pytest.raises(UserError, match=r"no vLLM server answers at http://127.0.0.1:9 .*vllm serve BASE"):
        client_of("http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"refused /v1/load_lora_adapter \(404\): .*No adapter found"):
        with_nothing(client_of(fake.url), tmp_path)
