"""What is known of a recipe's card: workspaces in each phase, and whether it computes in bfloat16."""

import json
from pathlib import Path

import pytest

from peakmem import cards, events
from peakmem.events import Event
from rlhf import recipe
from rlhf.errors import UserError
from rlhf.plan import plan
from rlhf.plan.hardware import gpu_of, lacks_bfloat16
from rlhf.plan.rehearsal.meta_runs import with_captures, workspaces
from rlhf.recipe import StageName

RECIPES = Path(__file__).parents[2] / "recipes"


def test_each_thread_and_the_captured_stream_have_a_workspace():
    loaded = recipe.load(RECIPES / "4090-llama2-7b" / "v1").recipe
    places: tuple[tuple[StageName, str], ...] = (
        ("sft", "train"),
        ("ppo", "rollout/prefill"),
        ("ppo", "rollout/decode"),
        ("evaluate", "load"),
        ("evaluate", "evaluate/decode"),
        ("merge", "merge"),
    )
    counts = [workspaces(loaded, stage, phase) / cards.workspace(gpu_of("4090")) for stage, phase in places]
    assert counts == [2, 2, 3, 1, 2, 0], "autograd's thread only where there is training; merging: no card"
    cpu = recipe.load(RECIPES / "cpu-tiny" / "v1").recipe
    assert workspaces(cpu, "sft", "train") == 0


@pytest.mark.parametrize(("name", "card"), [("4090-llama2-7b/v1", "4090"), ("8xh100-llama2-70b/v1", "h100")])
def test_each_of_several_cards_has_the_workspaces_of_one(name, card):
    pinned = json.loads((RECIPES / name / "predicted.json").read_text())["stages"]
    assert pinned["sft"]["train"]["workspace"] == 2 * cards.workspace(gpu_of(card))


def test_a_card_before_ampere_is_refused_for_bfloat16():
    loaded = recipe.load(RECIPES / "4090-llama2-7b" / "v3").recipe
    on_t4 = loaded.model_copy(update={"hardware": loaded.hardware.model_copy(update={"name": "t4"})})
    plan.check_type(loaded)
    with pytest.raises(UserError, match=r"hardware\.name: t4: a Tesla T4 does not compute in bfloat16"):
        plan.check_type(on_t4)


def test_several_cards_lack_what_one_of_them_lacks():
    assert lacks_bfloat16("4090") is lacks_bfloat16("some-card") is lacks_bfloat16("2x3060") is None
    assert "compute capability is 7.5, and 8.0 is needed" in str(lacks_bfloat16("t4"))
    assert lacks_bfloat16("2xt4") == lacks_bfloat16("t4")
    assert gpu_of("8xh100").multiprocessors == 132 != gpu_of("2xh100").multiprocessors


def test_a_full_card_gives_back_its_cache_before_a_graph_is_captured():
    """100 MiB that were released are held while 30 are captured, and are not needed."""
    mib, decode = 1 << 20, ("decode",)
    made = [Event(0, 100 * mib, (), "made"), Event(0, -100 * mib, (), "")]
    made += [Event(None, 0, decode, events.BEGIN), Event(None, 0, decode, events.CAPTURE)]
    made += [Event(1, 30 * mib, decode, "made"), Event(1, -30 * mib, decode, "")]
    found = with_captures(made, expandable=True)["decode"]
    assert (found.reserved, found.needed) == (140 * mib, round(40 * mib * 1.02))
