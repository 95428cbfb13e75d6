"""The command on programs as they are: what is printed, what is refused, and figures against a run that is marked."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1]
LOOP = """
import torch
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.blocks = nn.Embedding(5000, 64), nn.ModuleList([Block() for _ in range(DEPTH)])
        self.head = nn.Linear(64, 5000)
    def forward(self, ids):
        x = self.inner(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = Model()
optimizer = torch.optim.AdamW(model.parameters())  # of weights that move to the card later
model.to(device)
assert next(model.parameters()).device.type == "cuda" and next(model.parameters()).is_cuda
rows = torch.utils.data.TensorDataset(torch.randint(0, 5000, (64, 32)))
for (ids,) in torch.utils.data.DataLoader(rows, batch_size=8, num_workers=2, pin_memory=True):
    ids = ids.cuda(non_blocking=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() > 0
    assert torch.cuda.mem_get_info()[1] == torch.cuda.get_device_properties(0).total_memory
    print("loss", loss.item())
    EXTRA
raise SystemExit("the run should have ended before")
"""


def predict(folder: Path, text: str, *options: str) -> tuple[dict[str, Any], str]:
    """What is predicted for a program with this text as JSON, and what stands on stderr."""
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "peakmem", "--card", "4090", "--json", *options, "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment())
    return json.loads(done.stdout) if done.stdout else {}, done.stderr


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A loop with 12 blocks, of which 2 and 4 are run."""
    return predict(tmp_path_factory.mktemp("deep"), LOOP.replace("DEPTH", "12").replace("EXTRA", ""))


def test_a_loop_that_says_cuda_is_followed_for_two_steps(deep):
    found, stderr = deep
    assert "running it with 2 and 4" in stderr and "loss" in stderr
    assert found["steps"] == 2 and found["layers"] == 12 and found["fits"]
    assert {f"step {n}/{name}" for n in (1, 2) for name in ("forward", "backward", "optimizer")} <= {*found["phases"]}
    weights = 4 * (2 * 5000 * 64 + 5000 + 12 * (2 * 64 * 256 + 256 + 64))
    assert weights <= found["parts"]["weights"] <= weights * 1.02, "a bias takes a block"
    assert found["parts"]["optimizer states"] >= 2 * weights
    assert found["parts"]["logits"] >= 8 * 32 * 5000 * 4
    assert any(held["line"].startswith("train.py:") for held in found["largest"])
    assert any("a number that is not known is read as 1" in line for line in found["assumed"])


def test_few_layers_and_all_give_the_same(deep, tmp_path):
    whole, stderr = predict(tmp_path, LOOP.replace("DEPTH", "12").replace("EXTRA", ""), "--full")
    assert "running it with" not in stderr
    assert whole["phases"] == deep[0]["phases"] and whole["parts"] == deep[0]["parts"]


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("if loss > 2: break", "train.py:{}: the program goes on by a truth that only real numbers decide"),
        ("torch.compile(lambda x: x)(loss)", "train.py:{}: torch.compile of <lambda> is not followed"),
        ("torch.distributed.init_process_group('nccl')", "several processes (torch.distributed) is not followed"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_line(tmp_path, extra, reason):
    text = LOOP.replace("DEPTH", "1").replace("EXTRA", extra)
    found, stderr = predict(tmp_path, text)
    line = next(number for number, row in enumerate(text.splitlines(), 1) if extra in row)
    assert not found and stderr.splitlines()[-1].startswith("peakmem: ") and reason.format(line) in stderr


def test_a_program_that_leaves_the_card_alone_is_told_so(tmp_path):
    found, stderr = predict(tmp_path, "print(1)")
    assert not found and "the program has put nothing on the card" in stderr


def test_a_table_of_positions_is_no_vocabulary(tmp_path):
    """Its rows are often as many as a layer is wide, whose weights and states would be taken for logits."""
    wide = "self.head, self.places, self.wide = nn.Linear(64, 5000), nn.Embedding(1024, 64), nn.Linear(1024, 64)"
    text = LOOP.replace("self.head = nn.Linear(64, 5000)", wide)
    text = text.replace("return self.head(x)", "return self.head(x + self.wide(x.new_ones(1024)))")
    found, _ = predict(tmp_path, text.replace("DEPTH", "1").replace("EXTRA", ""))
    assert found["parts"]["optimizer states"] >= 2 * 4 * (2 * 5000 * 64 + 1024 * 64)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (["nope.py"], "nope.py: no such file, and no package has a command of that name"),
        (["-m", "nope"], "-m nope: there is no module of that name"),
    ],
)
def test_a_program_that_does_not_exist_is_named(tmp_path, program, said):
    command = [sys.executable, "-m", "peakmem", "--card", "4090", *program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stderr.strip()) == (2, f"peakmem: {said}")
