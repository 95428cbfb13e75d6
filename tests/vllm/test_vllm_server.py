"""GRPO and PPO that sample with a real vLLM server, started by the command that a run prints."""

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlhf.errors import UserError
from rlhf.recipe import PinnedRecipe
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.vllm import Client
from rlhf.run.directory import StageRun
from tests.helpers import GROUP, free_port, not_none, one_line_of, run_stages
from tests.lines import read_intact_lines
from tests.models import checkpoint, recipe_of
from tests.vllm.server import kill, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path("cpu-tiny/v1")
RESULTS = ("adapter/adapter_model.safetensors", "metrics.jsonl", "samples.jsonl")
ON_LENGTH = {"reward_funcs": ["length(most=5)"], "normalize_scores": False, "temperature": 0.7, "max_prompt_length": 64}
CLOSE = 1e-5  # nats per token, mean; float32 kernels differ by less
FAR = 1e-4  # nats per token, at most


class Ids(NamedTuple):
    pad_id: int
    eos_id: int


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A tiny model with random weights, in a shape that vLLM's CPU build computes: heads of 32."""
    return checkpoint(tmp_path_factory.mktemp("base"), "llama", num_attention_heads=1, num_key_value_heads=1)


@pytest.fixture(scope="module")
def asking(base) -> Callable[..., PinnedRecipe]:
    """PPO and GRPO from that base on a function, with a server at a port."""

    def made(port: int, base: str = base, **changes) -> PinnedRecipe:
        url = {"vllm_url": f"http://127.0.0.1:{port}"} | changes
        ppo = {f"ppo__{key}": value for key, value in (ON_LENGTH | url | {"steps": 4}).items()}
        absent = {"sft": None, "rm": None, "dpo": None, "merge": None}
        data = {"data__source": "additions", "data__additions": {"prompts": 100, "largest": 50}}
        return recipe_of(base, **absent, **data, grpo=GROUP | ON_LENGTH | url, **ppo)

    return made


def printed_command(loaded: PinnedRecipe, out: Path) -> str:
    """The command that a run prints which finds no server."""
    with pytest.raises(UserError, match="no vLLM server answers at") as caught:
        run_stages(loaded, out, "grpo")
    (command,) = re.findall("start one with: `(.*)`", one_line_of(caught))
    return str(command)


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def printed(asking, port, tmp_path_factory) -> str:
    return printed_command(asking(port), tmp_path_factory.mktemp("none"))


@pytest.fixture(scope="module")
def server(printed, port, tmp_path_factory) -> Iterator["subprocess.Popen[bytes]"]:
    """The server of the printed command, as it is."""
    with serving(printed, port, tmp_path_factory.mktemp("server") / "log") as process:
        yield process


@pytest.fixture(scope="module")
def done(server, asking, port, tmp_path_factory) -> Path:
    """The root of GRPO and PPO, which ran through."""
    out: Path = tmp_path_factory.mktemp("done")
    run_stages(asking(port), out, "grpo", "ppo")
    return out


def adapted(base: str, seed: int, folder: Path) -> PeftModel:
    """The base with a random adapter that changes what it says, which is also written to a folder."""
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    model.save_pretrained(str(folder))
    return model


def test_tokens_and_log_probabilities_are_those_of_plain_peft(server, base, port, tmp_path):
    client = Client(f"http://127.0.0.1:{port}", lambda: "")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(10, 300, (n,), generator=generator).tolist() for n in (3, 17, 8, 30)]
    found: list[list[list[int]]] = []
    for seed in (1, 2):
        model = adapted(base, seed, tmp_path / str(seed))
        ids = Ids(0, not_none(model.config.eos_token_id))
        with client.adapter(tmp_path / str(seed)):
            greedy = client.sample(prompts, ids, Sampling(64, 12, 0.0, 4))
            sampled = client.sample(prompts, ids, Sampling(64, 12, 0.7, 4))
        found.append([greedy.tokens[row][greedy.mask[row]].tolist() for row in range(4)])
        for row, prompt in enumerate(prompts):
            given = torch.tensor([prompt])
            with torch.no_grad():
                made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False)
                assert found[-1][row] == made[0, len(prompt) :].tolist()
                tokens = sampled.tokens[row][sampled.mask[row]]
                logits = model(torch.cat([given[0], tokens])[None]).logits[0, len(prompt) - 1 : -1]
            own = (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            served = not_none(sampled.logprobs)[row][sampled.mask[row]]
            assert (own - served).abs().max() < FAR and (own - served).abs().mean() < CLOSE
    assert found[0] != found[1], "the second adapter took effect"


@pytest.mark.parametrize("stage", ["grpo", "ppo"])
def test_a_policy_that_changes_is_sampled_as_it_is_trained(done, stage):
    rows = read_intact_lines(done / ROOT / stage / "metrics.jsonl")
    assert len(rows) == 4
    for row in rows:
        assert row["rollout/logprob_diff_max"] < FAR and row["rollout/logprob_diff_avg"] < CLOSE, row
        assert row["rollout/weight_avg"] == pytest.approx(1, abs=1e-3)
    assert abs(rows[-1]["objective/kl_per_token"]) > 100 * CLOSE, "the policy is not the base any more"


def test_a_server_of_another_base_is_refused(server, base, asking, port, tmp_path):
    other = Path(checkpoint(tmp_path / "other", "llama", num_attention_heads=1, num_key_value_heads=1))
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"] * 1.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    refused(asking(port, str(other)), tmp_path / "runs")


@pytest.mark.parametrize(
    ("words", "instead"), [("--dtype float32", "--dtype bfloat16"), ("--logprobs-mode processed_logprobs", "")]
)
def test_a_server_with_other_settings_is_refused(asking, printed, port, tmp_path, words, instead):
    other = free_port()
    assert words in printed
    command = printed.replace(words, instead).replace(f"--port {port}", f"--port {other}")
    with serving(command, other, tmp_path / "log"):
        refused(asking(other), tmp_path / "runs")


def refused(loaded: PinnedRecipe, out: Path) -> None:
    """The first step of a run ends in one line, and nothing is kept of it."""
    with pytest.raises(UserError, match="does not serve the policy: ") as caught:
        run_stages(loaded, out, "grpo")
    one_line_of(caught)
    assert not (out / ROOT / "grpo/checkpoints").exists()


def test_a_run_whose_server_dies_ends_in_the_same_bytes_with_another(
    done, server, asking, printed, port, tmp_path, monkeypatch
):
    seal = StageRun.seal_checkpoint

    def sealed_then_dead(self, step, folder):
        seal(self, step, folder)
        if step == 2:
            kill(server)

    monkeypatch.setattr(StageRun, "seal_checkpoint", sealed_then_dead)
    out = tmp_path / "runs"
    with pytest.raises(UserError, match=r"no vLLM server answers at .*step-000002 is kept: .*--resume") as caught:
        run_stages(asking(port), out, "grpo")
    one_line_of(caught)
    monkeypatch.undo()
    with serving(printed, port, tmp_path / "log"):
        run_stages(asking(port), out, "grpo", resume=True)
        assert same(out, done)


def same(out: Path, done: Path) -> bool:
    """Whether GRPO ended in the same bytes."""
    return all(
        (out / ROOT / "grpo" / name).read_bytes() == (done / ROOT / "grpo" / name).read_bytes() for name in RESULTS
    )
