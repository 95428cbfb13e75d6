"""How long the command takes, in processor time of all processes: a 7B model with LoRA, and a 135M model in full.

`python peakmem/examples/speed.py` needs torch, transformers and peft, and no GPU. The limits are 60 and 30 seconds.
"""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

LOOP = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig({shape})
model = LlamaForCausalLM(config).to(torch.bfloat16)
if {lora}:
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
model = model.cuda()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for _ in range(9):
    ids = torch.randint(0, config.vocab_size, (4, 512), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LLAMA_7B = "hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000"
SMOL = "hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, "
SMOL += "vocab_size=49152, tie_word_embeddings=True"
CASES: tuple[tuple[str, str, bool, list[str], int], ...] = (
    ("7B, LoRA", LLAMA_7B, True, [], 60),
    ("135M, all layers", SMOL, False, ["--full"], 30),
)


def seconds() -> float:
    """Return the processor seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the processor time of each case, its limit and what was predicted."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    for name, shape, lora, options, limit in CASES:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "train.py").write_text(LOOP.format(shape=shape, lora=lora))
            command = [sys.executable, "-m", "peakmem", "--card", "h100", *options, "train.py"]
            before = seconds()
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        whole = next((line for line in done.stdout.splitlines() if line.startswith("whole run")), done.stderr[-500:])
        figures = " ".join(whole.split())
        print(f"{name}: {seconds() - before:.0f} s of at most {limit}; {figures} GB allocated, reserved")


if __name__ == "__main__":
    main()
