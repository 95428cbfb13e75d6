"""torch's own snapshot of a run that no card has made."""

import pickle

from torch.cuda import _memory_viz

from peakmem import snapshot
from peakmem.events import BEGIN, EMPTIED, PRODUCT, WHOLE, Event
from peakmem.replaying import replay
from peakmem.script import Made

MIB = 2**20
EVENTS = [
    Event(None, 0, ("step 1", "forward"), BEGIN),
    Event(0, 30 * MIB, ("step 1", "forward"), "aten.mm.default, 31457280 bytes"),
    Event(None, 0, ("step 1", "forward"), PRODUCT),
    Event(1, 512, ("step 1", "forward"), "aten.sum.default, 512 bytes"),
    Event(0, -30 * MIB, ("step 1", "forward"), ""),
    Event(None, 0, ("step 1", "forward"), EMPTIED),
    Event(2, 3 * MIB, ("step 1", "forward"), "aten.add.Tensor, 3145728 bytes"),
]
MADE = [Made("train.py:3", (), ""), Made("train.py:4", (), ""), Made("model.py:5", (), "")]


def test_torch_reads_it_and_finds_what_is_predicted(tmp_path):
    for expandable in (False, True):
        snapshot.write(tmp_path / "out.pickle", EVENTS, MADE, expandable, 8 * MIB)
        found = pickle.loads((tmp_path / "out.pickle").read_bytes())
        held = sum(segment["total_size"] for segment in found["segments"])
        most = replay(EVENTS, expandable, 8 * MIB)[WHOLE].reserved
        assert 0 < held < most, "the free segment is gone"
        assert "total_allocated" in _memory_viz.segsum(found) and "<html" in _memory_viz.trace_plot(found).lower()
        blocks = [block for segment in found["segments"] for block in segment["blocks"]]
        assert sum(block["size"] for block in blocks) == held
        assert sum(block["size"] for block in blocks if block["state"] == "active_allocated") == 11 * MIB + 512


def test_each_allocation_has_its_line_and_each_release_that_of_its_allocation():
    trace = snapshot.of(EVENTS, MADE, False, 0)["device_traces"][0]
    actions = [(e["action"], e["frames"][0]["filename"] if e["frames"] else "") for e in trace]
    assert ("alloc", "train.py") in actions and ("free_completed", "train.py") in actions
    assert ("alloc", "model.py") in actions and ("segment_free", "") in actions
    assert [e["time_us"] for e in trace] == sorted(e["time_us"] for e in trace)
    assert max(e["addr"] for e in trace) < 2**53, "a viewer in JavaScript reads it exactly"
