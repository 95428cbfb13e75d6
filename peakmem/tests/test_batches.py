"""Batches after the steps that are run: the largest is found on the host and run, and what is not seen is named."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset

from peakmem import batches, predicting, report
from peakmem.batches import Batches
from peakmem.tests.test_command import predict

LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader
lengths = [64 + 7 * n % 64 for n in range(40)] + [2048]
rows = [torch.arange(n) % 500 for n in lengths]
loader, validation = DataLoader(rows, batch_size=1), DataLoader(rows[:2], batch_size=1)
net = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 500)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for batch in loader:
    net(batch.cuda()).logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_longest_batch_is_run_though_it_comes_41st(tmp_path):
    found, _ = predict(tmp_path, LOOP)
    every, _ = predict(tmp_path, LOOP, "--steps", "41")
    assert found["batches"]["largest"] == found["batches"]["batches"] == found["batches"]["of"] == 41
    assert found["allocated"] == every["allocated"] and found["reserved"] >= 0.95 * every["reserved"]
    assert any(line.startswith("train.py:7:") for line in found["not_seen"]), "the data of validation"


def test_fewer_batches_are_read_if_so_asked_and_that_is_said(tmp_path):
    found, _ = predict(tmp_path, LOOP, "--batches", "10")
    longest, _ = predict(tmp_path, LOOP, "--batches", "10", "--longest", "2048")
    assert found["batches"]["batches"] == 10 and found["batches"]["numbers"] < 128
    assert any("after the first 10" in line for line in found["not_seen"])
    assert longest["batches"]["numbers"] == 2048 and longest["allocated"] > 1.5 * found["allocated"]


def test_batches_of_no_loader_are_named_as_not_seen(tmp_path):
    found, _ = predict(tmp_path, LOOP.replace("in loader", "in (row[None] for row in rows)"))
    assert found["batches"] is None and "no DataLoader" in found["not_seen"][0]


class Forever(IterableDataset[torch.Tensor]):
    """Rows of growing lengths, without an end."""

    def __iter__(self):
        for number in range(sys.maxsize):
            yield torch.ones(number + 1)


def read(agreed: Path) -> batches.Seen:
    """What is seen of rows without an end."""
    reading = Batches(sys.maxsize, None, agreed)
    with ExitStack() as patched:
        for patch in reading.patches(lambda: "here"):
            patched.enter_context(patch)
        iterator = iter(DataLoader(Forever(), batch_size=1))
        next(iterator)
        assert reading.read_on() and reading.seen
        assert next(iterator).numel() == next(iterator).numel() == reading.seen.numbers
    return reading.seen


def test_two_processes_read_the_same_number_though_one_has_more_time(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "SECONDS", 0.05)
    first = read(tmp_path / "agreed")
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    assert read(tmp_path / "agreed") == first and first.batches == first.largest > 2


def test_the_largest_value_that_fits_is_found(tmp_path, monkeypatch):
    rows = LOOP.replace("torch.arange(n) % 500 for n in lengths", "torch.arange(64) for _ in range(10**4)")
    rows = rows.replace("batch_size=1), DataLoader", "batch_size=int(sys.argv[2])), DataLoader")
    (tmp_path / "train.py").write_text("import sys" + rows)
    monkeypatch.chdir(tmp_path)
    needed: dict[int, report.Prediction] = {}

    def asked(run: predicting.Run):
        value = int(run.arguments[1])
        needed[value] = predicted(run)
        return needed[value]

    predicted = predicting.predict_run
    monkeypatch.setattr(predicting, "predict_run", asked)
    value, found = predicting.fit("batch-size", predicting.Run("train.py", card="0.7GB", batches=2))
    assert found and found.fits and value in needed and not needed[value + 1].fits
    Path("few.py").write_text("import sys" + rows.replace("10**4", "3"))
    assert predicting.fit("batch-size", predicting.Run("few.py", card="4090", batches=2))[0] == 8, "it has three rows"
    Path("deaf.py").write_text("import torch\nx = torch.zeros(2**20, device='cuda')")
    assert predicting.fit("batch-size", predicting.Run("deaf.py", card="4090"))[0] == 2, "it does not read it"
    assert Path("train.py").exists()
