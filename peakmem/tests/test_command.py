"""The command on programs as they are: what is printed, what is refused, and figures against a run that is marked."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peakmem import predict as predict_program
from peakmem import report

PACKAGE = Path(__file__).parents[1]
CODES = {2: "options", 3: "refused", 4: "failed", 5: "crashed"}
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


def predict(folder: Path, text: str, *options: str, code: int | None = None) -> tuple[dict[str, Any], str]:
    """What is predicted for a program with this text as JSON, and what stands on stderr."""
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "peakmem", "--card", "4090", "--json", *options, "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment())
    found = json.loads(done.stdout)
    assert code is None or (done.returncode, found["error"]) == (code, CODES[code])
    return found, done.stderr


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A loop with 12 blocks, of which 2 and 4 are run."""
    return predict(tmp_path_factory.mktemp("deep"), LOOP.replace("DEPTH", "12").replace("EXTRA", ""))


def test_a_loop_that_says_cuda_is_followed_for_two_steps(deep):
    found, stderr = deep
    assert "running it with 2 and 4" in stderr and "loss" not in stderr, "what a shortened model prints is not shown"
    assert found["steps"] == 2 and found["layers"] == 12 and found["fits"]
    assert {f"step {n}/{name}" for n in (1, 2) for name in ("forward", "backward", "optimizer")} <= {*found["phases"]}
    weights = 4 * (2 * 5000 * 64 + 5000 + 12 * (2 * 64 * 256 + 256 + 64))
    assert weights <= found["parts"]["weights"] <= weights * 1.02, "a bias takes a block"
    assert found["parts"]["optimizer states"] >= 2 * weights
    assert found["parts"]["logits"] >= 8 * 32 * 5000 * 4
    assert any(held["line"].startswith("train.py:") for held in found["largest"])
    assert any("a number that is not known is read as 1" in line for line in found["assumed"])
    assert found["between"][0] < found["needed"] < found["between"][1] < found["card_bytes"]
    assert "torch" in found["versions"] and found["verdict"] == "fits"


def test_few_layers_and_all_give_the_same(deep, tmp_path):
    whole, stderr = predict(tmp_path, LOOP.replace("DEPTH", "12").replace("EXTRA", ""), "--full")
    assert "running it with" not in stderr
    assert whole["phases"] == deep[0]["phases"] and whole["parts"] == deep[0]["parts"]


def test_what_cannot_be_followed_is_refused_with_its_line(tmp_path):
    extra = "if loss > 2: break"
    text = LOOP.replace("DEPTH", "1").replace("EXTRA", extra)
    found, stderr = predict(tmp_path, text, code=3)
    line = next(number for number, row in enumerate(text.splitlines(), 1) if extra in row)
    assert found["message"].startswith(f"train.py:{line}: ") and found["message"] in stderr.splitlines()[-1]
    assert "loss" in stderr, "of the whole model it is shown"


def test_an_error_of_the_program_shows_the_program_s_lines_alone(tmp_path):
    """After a line that was not ended, such as a bar of progress."""
    text = """
import sys, torch
sys.stderr.write("50 %")
torch.nn.functional.linear(torch.ones(2, 5, device="cuda"), torch.ones(4, 4, device="cuda"))
"""
    found, stderr = predict(tmp_path, text, code=4)
    said, *lines = stderr.splitlines()[1:]
    assert said == "50 %Traceback (most recent call last):"
    files = [line.split('"')[1] for line in lines if line.startswith("  File")]
    assert "train.py" in files[0] and not any(file.startswith(str(PACKAGE)) or "runpy" in file for file in files)
    assert "RuntimeError" in found["message"] and "train.py" in found["message"]


def test_wrong_options_and_wrong_syntax_are_said_as_json_too(tmp_path):
    assert "--snapshot" in predict(tmp_path, "", "--snapshot", "nowhere/out.pickle", code=2)[0]["message"]
    assert "SyntaxError" in predict(tmp_path, "x = (", code=4)[0]["message"]


def test_a_fault_of_ours_says_so(tmp_path):
    """An answer that fails inside this package is no error of the program."""
    text = "import torch, peakmem.cuda\ndel peakmem.cuda._Stream.query\npeakmem.cuda._Event = None\n"
    text += "torch.cuda.Stream().record_event()"
    found, _ = predict(tmp_path, text, code=5)
    assert "a fault of peakmem" in found["message"] and "train.py:4" in found["message"]


def test_files_of_the_current_folder_are_no_modules_of_a_program_elsewhere(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    (here / "pickle.py").write_text("raise RuntimeError('this is not the library')")
    (there / "train.py").write_text("import torch\nx = torch.zeros(2**20, device='cuda')")
    monkeypatch.chdir(here)
    assert predict_program(str(there / "train.py")).allocated == 2**22


def test_without_a_card_there_are_figures_and_no_verdict(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\nx = torch.zeros(2**28, device='cuda')\nopen('written', 'w')")
    found = predict_program("train.py", scratch=True)
    assert found.allocated == 2**30 and found.fits is None and found.verdict == "needs"
    assert "the smallest known card that has it" in report.as_text(found)
    assert not Path("written").exists(), "it ran in a copy of the folder"
    predict_program("train.py", card="24GiB")
    assert Path("written").exists(), "the program really runs"


@pytest.mark.parametrize(("card", "verdict"), [("4090", "fits"), ("1.58GiB", "may not fit"), ("1GiB", "does not fit")])
def test_a_verdict_is_of_the_interval(card, verdict, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\nx = torch.zeros(2**28, device='cuda')")
    found = predict_program("train.py", card=card)
    assert found.verdict == verdict and found.fits is (verdict == "fits")
