"""Programs of packages that nobody here wrote, as they are: each works."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("trl")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

REWARD = "def count(completions, **_): return [float(len(text)) for text in completions]\n"
ROWS = {
    "text": {"text": "a b c d e f g h"},
    "pairs": {"prompt": "a b c", "chosen": " d e", "rejected": " f g h"},
    "prompts": {"prompt": "a b c"},
}
LIGHTNING = """
import lightning, torch

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(256, 256)

    def training_step(self, batch, number):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

rows = torch.utils.data.TensorDataset(torch.zeros(64, 256))
trainer = lightning.Trainer(max_epochs=1, precision="bf16-mixed", logger=False, enable_checkpointing=False)
trainer.fit(Module(), torch.utils.data.DataLoader(rows, 16))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's configuration with eight layers, its tokenizer, rows, a reward and a program."""
    root = tmp_path_factory.mktemp("programs")
    vocabulary = {word: number for number, word in enumerate("abcdefgh|~?")}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"eos_token": "|", "pad_token": "~", "unk_token": "?"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    tokenizer.save_pretrained(root / "model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
    sizes |= {"vocab_size": 64, "max_position_embeddings": 256}
    transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(root / "model")
    for name, row in ROWS.items():
        (root / name).mkdir()
        (root / name / "train.json").write_text(json.dumps([row] * 32))
    (root / "rewards.py").write_text(REWARD)
    (root / "loop.py").write_text(LIGHTNING)
    return root


@pytest.mark.parametrize(
    ("program", "rows", "options"),
    [
        ("sft", "text", ["--use_peft"]),
        ("dpo", "pairs", []),
        ("reward", "pairs", []),
        ("grpo", "prompts", ["--reward_funcs", "rewards.count", "--max_completion_length", "16"]),
    ],
)
def test_trl_works(folder, program, rows, options):
    model = ["--model_name_or_path", "model", "--dataset_name", rows, "--output_dir", "out", "--report_to", "none"]
    found = predicted(folder, "trl", program, *model, *options)
    assert found["reserved"] >= found["allocated"] > 0


def test_lightning_works(folder):
    pytest.importorskip("lightning")
    states = 4 * (256 * 256 + 256) * 4  # weights, gradients, two moments of AdamW
    assert predicted(folder, "loop.py")["allocated"] >= states


def predicted(folder: Path, *command: str) -> dict[str, Any]:
    """What peakmem says of a command in a folder."""
    options = ["--card", "4090", "--batches", "8", "--json"]
    environment = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{folder}", "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    run = [sys.executable, "-P", "-m", "peakmem", *options, *command]
    done = subprocess.run(run, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found
