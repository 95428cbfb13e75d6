"""`rlhf doctor`: each lack is named with its way out, for a recipe that needs it and not for others."""

import pytest

from rlhf import recipe
from rlhf.plan import doctor
from rlhf.plan.doctor import Gpu, Host, Needs
from rlhf.process.memory import Free
from tests.helpers import RECIPE, rlhf

GB = 10**9
CARD = Gpu("RTX 4090", "580.65.06", 25 * GB, 24 * GB)
WELL = Host(
    free=Free(60 * GB, "free on this machine"),
    disk=200 * GB,
    gpus=[CARD],
    torch="2.13.0, CUDA 13.0",
    torch_on_card=True,
    engines=["docker"],
    packages=[],
)
NEEDS = Needs("4090-x v1", on_card=True, cards=1, card=12 * GB, host=15 * GB, disk=47 * GB)
ON_CPU = Needs("cpu-x v1", on_card=False, cards=1, host=GB)


def lacks(host: Host, needs: Needs) -> dict[str, tuple[str, str]]:
    """What is not well: state and way out by name."""
    return {c.name: (c.state, c.way_out) for c in doctor.checks(host, needs) if c.state != "ok"}


def test_a_machine_that_has_all_lacks_nothing():
    assert lacks(WELL, NEEDS) == lacks(WELL, ON_CPU) == {}


@pytest.mark.parametrize(
    ("changes", "name", "state", "way_out"),
    [
        ({"gpus": [CARD._replace(driver="575.51")]}, "driver", "missing", "driver 580 or newer"),
        ({"gpus": [CARD._replace(free=2 * GB)]}, "card 0", "missing", "what else runs"),
        ({"gpus": [CARD._replace(total=8 * GB, free=8 * GB)]}, "card 0", "missing", "plan --fit card"),
        ({"torch": None}, "torch", "missing", "make setup"),
        ({"engines": []}, "container", "note", "--runtime local"),
        ({"free": Free(GB, "left of the container's limit")}, "memory", "missing", "a machine with more"),
        ({"disk": 20 * GB}, "disk", "missing", "make room"),
    ],
)
def test_a_lack_is_named_with_its_way_out(changes, name, state, way_out):
    (found,) = lacks(WELL._replace(**changes), NEEDS).items()
    assert found[0] == name and found[1][0] == state and way_out in found[1][1]


def test_a_recipe_for_a_cpu_needs_no_card_and_one_for_several_cards_needs_them_all():
    bare = WELL._replace(gpus=[], torch_on_card=False, engines=[])
    assert {name: state for name, (state, _) in lacks(bare, ON_CPU).items()} == {"driver": "note"}
    missing = {name for name, (state, _) in lacks(bare, NEEDS).items() if state == "missing"}
    assert missing == {"driver", "torch"}
    assert lacks(WELL, NEEDS._replace(cards=2))["cards"][0] == "missing"


def test_a_recipe_s_needs_are_those_that_are_pinned_beside_it():
    """Llama-2-7B: 13.5 GB of weights in 16 bits, downloaded and merged, and the PPO of the recipe's README."""
    needs = doctor.needs_of(recipe.load(RECIPE.parents[1] / "4090-llama2-7b/v3"))
    assert needs.on_card and needs.card and needs.host and needs.disk
    assert 11.5 < needs.card / GB < 12.5 and 14 < needs.host / GB < 16 and 46 < needs.disk / GB < 48
    assert doctor.needs_of(recipe.load(RECIPE)).disk is None


def test_the_exit_code_says_whether_the_recipe_can_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "look", lambda out: WELL)
    code, out, _ = rlhf(monkeypatch, capsys, "doctor", "--hw", "4090")
    assert code == 0 and out.splitlines()[-1] == "4090-llama2-7b v3 can run here"
    monkeypatch.setattr(doctor, "look", lambda out: WELL._replace(gpus=[], disk=0))
    code, out, _ = rlhf(monkeypatch, capsys, "doctor", "--hw", "4090")
    assert code == 1 and out.splitlines()[-1] == "4090-llama2-7b v3 cannot run here yet: driver, disk"
