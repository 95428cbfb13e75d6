"""What only a GPU can show: the chain in bfloat16 and NF4, memory against its prediction, agreement of kernels.

`make bench-gpu` runs these first. Everywhere else they are skipped, and say so.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.peaks import measure
from peakmem.allocator import LARGE_SEGMENT
from rlhf import recipe
from rlhf.data.batch import collate
from rlhf.models.lean.trunk import LeanTrunk, RoleTrunk
from rlhf.models.output_layer import output_of
from rlhf.models.precision import mixed_precision
from rlhf.plan.predict import Predictor
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.rehearsal import random_weights_changes
from rlhf.rollout import graphs
from rlhf.rollout.decoding import Sampling
from rlhf.rollout.engine import sample
from tests.helpers import RECIPE, run_stages, undefined_metrics
from tests.lines import read_intact_lines
from tests.trunk_models import distance, trunk_model

pytestmark = pytest.mark.gpu
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 8000,
}
# Changes to a width at which a base or a key-value cache that is not counted exceeds what a prediction may miss.
WIDE: dict[str, Any] = {
    f"model__architecture__{key}": value
    for key, value in {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }.items()
}
STAGES: tuple[StageName, ...] = ("sft", "rm", "ppo", "dpo")
GROUPS = RECIPE.parents[1] / "cpu-tiny-groups" / "v1"
LEAN: dict[str, Any] = {  # with GRPO, whose prompts are shared by a group
    "hardware__trunk": "lean",
    "hardware__joined_rows": True,
    "grpo__steps": 2,
    "grpo__batch_size": 16,
    "grpo__per_device_train_batch_size": 8,
    "grpo__rollout_batch_size": 16,
    "grpo__save_steps": 2,
    "grpo__eval_steps": 2,
    "grpo__max_eval_samples": 16,
}
PAGED: dict[str, Any] = {  # adapters whose optimizer states bitsandbytes pages: those of at least 1e5 numbers
    "lora__r": 128,
    "lora__lora_alpha": 256,
    **{f"{stage}__optim": "paged_adamw_8bit" for stage in STAGES},
}


def card() -> str:
    """The hardware name under which `rlhf.plan.predict` knows what cuBLAS allocates on this card."""
    return "h100" if torch.cuda.get_device_capability()[0] >= 9 else "4090"


def on_gpu(quantization: str, directory: Path = RECIPE, **changes) -> PinnedRecipe:
    """A small Llama with random weights in bfloat16 on the card, a few steps of each stage."""
    overrides = {
        "hardware.device": "cuda",
        "hardware.name": card(),
        "hardware.threads": None,
        "model.dtype": "bfloat16",
        "model.quantization": quantization,
        **{f"model.architecture.{key}": value for key, value in SHAPE.items()},
        "lora.lora_dropout": 0.0,
        "ppo.steps": 2,
        "ppo.batch_size": 16,
        "ppo.per_device_train_batch_size": 8,
        "ppo.rollout_batch_size": 16,
        "ppo.save_steps": 2,
        "ppo.eval_steps": 2,
        "ppo.max_eval_samples": 16,
        "evaluate.max_samples": 16,
        **{f"{s}.max_steps": 4 for s in ("sft", "rm", "dpo")},
        **{f"{s}.logging_steps": 1 for s in ("sft", "rm", "dpo")},
        **{f"{s}.save_steps": 4 for s in ("sft", "rm", "dpo")},
        **{f"{s}.max_eval_samples": 16 for s in ("sft", "rm", "dpo")},
        **{f"{s}.per_device_train_batch_size": 8 for s in ("sft", "rm", "dpo")},
    }
    loaded = recipe.load(directory, overrides)
    random = random_weights_changes(loaded.recipe, 300, "hh")
    return recipe.load(directory, overrides | random | {k.replace("__", "."): v for k, v in changes.items()})


@pytest.mark.parametrize("kind", ["none", "nf4", "lean"])
def test_the_chain_runs_and_dpo_begins_at_its_reference(tmp_path, kind):
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    loaded = on_gpu("none", GROUPS, **LEAN) if kind == "lean" else on_gpu(kind, **(PAGED if kind == "nf4" else {}))
    for stage in (*STAGES, "grpo") if kind == "lean" else STAGES:
        assert undefined_metrics(run_stages(loaded, tmp_path, stage)) == set(), stage
    first = read_intact_lines(tmp_path / loaded.name / loaded.version / "dpo" / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-3)  # policy and reference are the same adapter still
    if kind == "nf4":
        from bitsandbytes.functional import GlobalPageManager

        assert GlobalPageManager.get_instance().paged_tensors, "no optimizer state was paged"


def test_after_a_refused_capture_the_card_can_be_used():
    x = torch.ones(1000, 1000, device="cuda")
    with pytest.raises(RuntimeError), graphs.capturing(torch.cuda.CUDAGraph()):
        (x @ x).sum().item()
    torch.cuda.empty_cache()  # which fails where the allocator is still in the capture
    graph = torch.cuda.CUDAGraph()
    with graphs.capturing(graph):
        y = x @ x
    graph.replay()
    assert torch.equal(y, x @ x)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_two_runs_have_the_same_bits(tmp_path, quantization):
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    loaded = on_gpu(quantization)
    for number in ("first", "second"):
        run_stages(loaded, tmp_path / number, *STAGES)
    names = [f"{stage}/{file}" for stage in STAGES for file in ("adapter/adapter_model.safetensors", "metrics.jsonl")]
    first, second = (tmp_path / number / loaded.name / loaded.version for number in ("first", "second"))
    assert [name for name in names if (first / name).read_bytes() != (second / name).read_bytes()] == []


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_memory_is_as_predicted_in_every_phase(quantization):
    """Within 5 % and two pages of the allocator, which constant costs of kernels may take."""
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    loaded = on_gpu(quantization, **WIDE, **(PAGED if quantization == "nf4" else {}))
    measured = measure(loaded, list(STAGES))
    with Predictor() as predictor:
        for stage in STAGES:
            predicted = predictor.predict(loaded, stage)
            assert any(peak.paged_bytes for peak in predicted.phases.values()) == (quantization == "nf4"), stage
            for phase, peak in predicted.phases.items():
                if phase != "load":
                    real = measured[stage][phase]
                    close = 0.05 * real + 2 * LARGE_SEGMENT
                    assert abs(peak.peak_bytes - real) <= close, (stage, phase, peak.peak_bytes, real)


def test_a_micro_batch_changes_the_gradient_by_rounding_only(tmp_path):
    """PPO twice from the same parents: the logged losses of the first step agree."""
    first_rows = []
    for micro in (4, 16):
        loaded = on_gpu("none", ppo__per_device_train_batch_size=micro)
        run_stages(loaded, tmp_path / str(micro), *STAGES[:3])
        folder = tmp_path / str(micro) / loaded.name / loaded.version / "ppo"
        first_rows.append(read_intact_lines(folder / "metrics.jsonl")[0])
    for key in ("loss/policy_avg", "loss/value_avg", "objective/kl_per_token"):
        assert first_rows[0][key] == pytest.approx(first_rows[1][key], rel=0.02, abs=2e-3), key


def test_the_flash_attn_package_agrees_with_torch_s_kernel(tmp_path):
    pytest.importorskip("flash_attn", reason="flash-attn is the extra `flash`")
    losses = []
    for attention in ("auto", "flash_attention_2"):
        loaded = on_gpu("none", model__attention=attention)
        run_stages(loaded, tmp_path / attention, "sft")
        folder = tmp_path / attention / loaded.name / loaded.version / "sft"
        losses.append(read_intact_lines(folder / "metrics.jsonl")[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)  # bfloat16 keeps 8 bits


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_lean_trunk_s_kernels_are_as_exact_as_the_library_s(kind):
    """Hidden states and gradients in bfloat16; the truth are the same weights in float32."""
    exact, half = trunk_model(kind).cuda(), trunk_model(kind, torch.bfloat16).cuda()
    for a, b in zip(exact.parameters(), half.parameters(), strict=True):
        a.data.copy_(b)
    ids = torch.randint(64, (3, 9), device="cuda")

    def step(model, trunk: LeanTrunk | None) -> list[torch.Tensor]:
        model.zero_grad()
        if trunk:
            with trunk.merging("policy"):
                states = trunk.hidden("policy", ids)
                states.float().square().sum().backward()
        else:
            with mixed_precision(model):
                states = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state
            states.float().square().sum().backward()
        return [states.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    truth = step(exact, None)
    usual, lean = step(half, None), step(half, LeanTrunk(half.get_base_model()))
    assert len(truth) == len(usual) == len(lean) == 1 + 2 * 2 * 7
    errors, usual_errors = ([distance(x, y) for x, y in zip(found, truth, strict=True)] for found in (lean, usual))
    assert 0 < errors[0] < 1.1 * usual_errors[0]
    assert sum(errors) < 1.1 * sum(usual_errors)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_rows_joined_without_padding_are_as_exact_as_padded_ones(kind, shared):
    """Hidden states and gradients in bfloat16, of a prompt's rows apart and together; the truth is float32."""
    exact, half = trunk_model(kind).cuda(), trunk_model(kind, torch.bfloat16).cuda()
    for a, b in zip(exact.parameters(), half.parameters(), strict=True):
        a.data.copy_(b)
    prompts = [[6 + place for place in range(length)] for length in (3, 3, 40, 40, 9)]
    responses = [[7 + place for place in range(length)] for length in (5, 30, 1, 12, 3)]
    rows = collate(prompts, responses, 0, 1, torch.device("cuda"))
    if shared:
        rows = replace(rows, prompt_numbers=torch.tensor([0, 0, 1, 1, 2], device="cuda"))

    def step(model, packs: bool) -> list[torch.Tensor]:
        trunk = LeanTrunk(model.get_base_model(), joins=packs)
        assert trunk.packs == packs
        model.zero_grad()
        with trunk.merging("policy"):
            states = trunk.response_hidden("policy", rows)[rows.mask]
            states.float().square().sum().backward()
        return [states.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    truth, padded, joined = step(exact, False), step(half, False), step(half, True)
    errors, usual = ([distance(x, y) for x, y in zip(found, truth, strict=True)] for found in (joined, padded))
    assert 0 < errors[0] < 1.1 * usual[0]
    assert sum(errors) < 1.1 * sum(usual)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_lean_trunk_samples_what_its_passes_say(kind):
    """By captured steps, over prompts that are joined: log-probabilities of a pass over whole rows."""
    peft = trunk_model(kind, torch.bfloat16).cuda()
    base = peft.get_base_model()
    trunk = LeanTrunk(base, joins=True)
    assert trunk.decodes
    prompts = [[6 + place % 50 for place in range(length)] for length in (3, 9, 20, 7)]
    torch.manual_seed(0)
    settings = Sampling(32, 40, 1.0, batch_size=8, samples_per_prompt=2)
    with trunk.merging("policy"), torch.no_grad():
        rollout = sample(base, prompts, Ids(), settings, trunk=RoleTrunk(trunk, "policy"))
        logits = base.get_output_embeddings()(trunk.response_hidden("policy", rollout))
    own = logits.float().log_softmax(-1).gather(2, rollout.tokens[..., None]).squeeze(2)
    assert rollout.logprobs is not None and rollout.mask.sum() > 8
    assert (rollout.logprobs - own)[rollout.mask].abs().max() < 0.2


class Ids:
    """The special tokens that sampling needs of a tokenizer."""

    pad_id, eos_id = 0, 5


def test_logits_of_a_bfloat16_layer_are_not_rounded():
    layer = torch.nn.Linear(256, 500, bias=False).bfloat16().cuda()
    states = torch.randn(40, 256).bfloat16().cuda()
    exact = states.double() @ layer.weight.double().t()
    assert output_of(layer, states).dtype == torch.float32
    assert (output_of(layer, states) - exact).abs().max() < 1e-5 * exact.abs().max()
