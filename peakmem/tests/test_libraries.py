"""Models and adapters of other libraries, on real tensors and on the stand-in."""

import gc
import os
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function

from peakmem.device import StandIn
from peakmem.events import Parts, Peak
from peakmem.tracker import LOGITS_TILE, Tracker

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
PHASES = ("load", "train")


def tracker(vocab_size: int) -> Tracker:
    return Tracker("cpu", PHASES, vocab_size)


def parts(peak: Peak) -> Parts:
    """Components at the highest of a phase's peaks."""
    return max(peak.by_operation.values(), key=lambda components: sum(components.values()))


SCORER: dict[str, Any] = {"num_labels": 1, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Numbers in: embedding and output layer 1000 x 64 each; per layer q, o 64 x 64, k, v 32 x 64, three of 128 x 64, and
# two norms of 64; a last norm. Every one of these takes whole blocks, but for the norms' 256 bytes.
LAYER = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64) + 2 * 512
BASE = 4 * 2 * 1000 * 64 + 2 * LAYER + 512
BUFFERS = 2 * 512  # the rotary frequencies, twice: 8 numbers
# q (64 -> 64), k (64 -> 32), v, o at rank 2: A 2 x 64, B out x 2; a block holds any of them.
LORA = 2 * 4 * 2 * 512


def causal(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))


def scorer() -> Any:
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, **SCORER))


def lora(base: nn.Module, task: str) -> Any:
    config = peft.LoraConfig(task_type=task, r=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return peft.get_peft_model(base, config)


def test_base_adapters_and_their_gradients_and_states():
    with tracker(1000) as found:
        model = lora(causal(tie_word_embeddings=False), "CAUSAL_LM")
        with record_function("load"):
            pass
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, foreach=False)
        model(input_ids=torch.zeros(2, 5, dtype=torch.int64)).logits.sum().backward()
        optimizer.step()
        gc.collect()
        with record_function("train"):
            pass
    loaded, stepped = (parts(found.peaks()[name]) for name in ("load", "train"))
    assert len(trained) == 16
    assert loaded["base"] == BASE + BUFFERS
    assert loaded["adapters"] == LORA == 16 * 512
    assert stepped["base"] == loaded["base"]
    assert stepped["gradients"] == LORA, "of the adapters only"
    assert stepped["optimizer"] == 3 * LORA, "two moments and a counter for each tensor, a block each"


def test_the_score_head_is_no_part_of_the_base():
    with tracker(1000) as found:
        model = lora(scorer(), "SEQ_CLS")
        with record_function("load"):
            pass
    components = parts(found.peaks()["load"])
    assert components["base"] == BASE + BUFFERS - 4 * 1000 * 64, "without the output layer"
    assert components["heads"] >= 512
    assert components["adapters"] == LORA
    del model


@pytest.mark.parametrize(("vocab_size", "is_logits"), [(32_000, True), (32_768, True), (151_936, False)])
def test_a_tile_of_trl_s_head_is_logits_where_it_holds_whole_rows(vocab_size, is_logits):
    with tracker(vocab_size) as found:
        tile = torch.zeros(2, LOGITS_TILE)
    assert ("logits" in parts(found.peaks()[""])) == is_logits
    assert pytest.importorskip("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE == LOGITS_TILE
    del tile


# -- patches -----------------------------------------------------------------------------------------------------------


def watched() -> dict[str, Any]:
    """Everything that could be changed: modules, classes and the environment."""
    places: list[Any] = [F, torch, torch.amp, torch.cuda, torch.Tensor, nn.Module, torch.optim.Optimizer]
    places += [transformers, transformers.TrainingArguments, transformers.Trainer, transformers.PreTrainedModel]
    names = ["torch.utils._foreach_utils", "torch.optim.optimizer", "transformers.training_args", "trl.trainer.utils"]
    names += ["trl.kernels.chunked_logprob", "bitsandbytes.functional", "bitsandbytes.optim.optimizer"]
    places += [sys.modules[name] for name in names if name in sys.modules]
    places += [sys.modules["peft.tuners.lora"].LoraLayer]
    attributes = {f"{place.__name__}.{key}": value for place in places for key, value in vars(place).items()}
    return attributes | {f"environ.{key}": value for key, value in os.environ.items()}


def _same(a: object, b: object) -> bool:
    return a is b or (isinstance(a, str | int) and a == b)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_everything_is_as_before_afterwards(device):
    with StandIn("cpu", PHASES, 10**9):  # what is imported late is there
        pass
    before = watched()

    def changed() -> set[str]:
        now = watched()
        return {key for key in {*before, *now} if not _same(before.get(key), now.get(key))}

    with StandIn(device, PHASES, 10**9):
        inside = changed()
    assert {"torch.nn.functional.linear", "environ.ACCELERATE_TORCH_DEVICE", "Trainer._save_checkpoint"} <= inside
    assert not changed()
    with pytest.raises(ZeroDivisionError), StandIn(device, PHASES, 10**9):
        raise ZeroDivisionError
    assert not changed()


def test_a_symbol_that_a_version_lacks_is_named_and_the_rest_goes_on(monkeypatch, capsys):
    monkeypatch.delattr("transformers.Trainer._save_checkpoint")
    with StandIn("cuda", PHASES, 10**9) as stand_in, record_function("train"):
        torch.zeros(128, device="meta")
    (line,) = capsys.readouterr().err.splitlines()
    version = transformers.__version__
    assert line.startswith(f"peakmem: transformers {version} has no transformers.trainer:Trainer._save_checkpoint")
    assert stand_in.peaks()["train"].bytes == 512
