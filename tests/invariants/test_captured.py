"""Updates that replay captured passes: the same gradients and statistics as without, and no graph where one errs."""

import gc
import random
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf import recipe
from rlhf.data.batch import Lengths, Rollout
from rlhf.data.worlds.lengths import lengths_of_hh
from rlhf.models.lean import filled_sizes
from rlhf.models.lean.packed import pieces_of, sizes_of
from rlhf.models.lean.trunk import LeanTrunk
from rlhf.models.loading import load_tokenizer
from rlhf.process import distributed
from rlhf.recipe.schema_online import Ppo
from rlhf.run.directory import StageRun
from rlhf.stages import groups, ppo
from rlhf.stages.online import captured
from rlhf.stages.online.train_state import TrainState
from tests.helpers import small
from tests.invariants import group_learner, ppo_learner
from tests.invariants.ppo_learner import PROMPTS
from tests.rollouts import grouped_rollout, made_up_rollout
from tests.tape import Tape, capture_passes_on_cpu

STEPS = 3
V4 = recipe.load(Path(__file__).parents[2] / "recipes" / "h100-mistral-7b" / "v4")
ONE = torch.ones(())


@pytest.fixture(scope="module")
def run(trained) -> StageRun:
    return StageRun(trained, small(), "ppo")


@pytest.fixture(scope="module")
def rollouts(run) -> list[Rollout]:
    draw, tokenizer = torch.Generator().manual_seed(3), load_tokenizer(run.base)
    return [made_up_rollout(PROMPTS[step:] + PROMPTS[:step], tokenizer, draw) for step in range(STEPS)]


@pytest.fixture
def graphs_of(monkeypatch) -> list[Tape]:
    """A CPU that captures, with few tokens in a graph. Holds the graphs that are made."""
    monkeypatch.setattr(filled_sizes, "UNIT", 4)
    return capture_passes_on_cpu(monkeypatch)


def trained_by(learner: Any, batches: Any, wanted: bool) -> tuple[Tensor, list[dict[str, float]]]:
    """Trained weights after some updates, and the statistics of each."""
    learner.state.capture_passes(wanted)
    torch.manual_seed(1)
    stats = []
    for batch in batches(learner):
        stats.append(learner.update(batch))
        learner.state.advance(0.1)
    if wanted:
        assert_read_from_what_stays(learner)
    return torch.cat([p.detach().flatten() for p in learner.state.all_parameters]), stats


def assert_same(a: tuple[Tensor, list[dict[str, float]]], b: tuple[Tensor, list[dict[str, float]]]) -> None:
    (weights, stats), (others, more) = a, b
    assert (weights - others).norm() < 4e-6 * others.norm()
    assert [{name: pytest.approx(x, rel=1e-4, abs=1e-5) for name, x in part.items()} for part in more] == stats


def assert_read_from_what_stays(learner: Any) -> None:
    """Graphs find nothing but what they were given, gradients and the weights: all of it is there to the end.

    The addresses are those of now, after the optimizer's steps.
    """
    passes, shared = learner.state.captured, learner.shared
    heads = [head for head in (shared.value_head, *shared.score_heads.values()) if head is not None]
    stays = [*passes._gradients.values()]
    for module in (shared.peft, *heads):
        stays += [*module.parameters(), *module.buffers()]
    for graph in passes._graphs.values():
        found = {storage.data_ptr() for storage in graph.graph.outside.values()}
        assert found <= {x.untyped_storage().data_ptr() for x in (*stays, *graph.inputs)}


def ppo_from(run: StageRun, rollouts: list[Rollout], wanted: bool, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "num_mini_batches": 2,
        "lean": True,
        "kind": "adapter",
    } | changes
    learner = ppo_learner.new_learner(run, **settings)
    return trained_by(learner, lambda learner: (ppo.make_batch(learner, rollout) for rollout in rollouts), wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"value_warmup_steps": 1, "gradient_checkpointing": True},
        {"kind": "head", "value_warmup_steps": 1, "entropy_coef": 0.1, "kl_penalty": "loss", "kl_estimator": "k3"},
    ],
)
def test_ppo_learns_the_same_from_graphs(run, rollouts, graphs_of, changes):
    assert_same(*(ppo_from(run, rollouts, wanted, **changes) for wanted in (True, False)))
    assert len(graphs_of) > 2 and sum(max(0, graph.replays - 1) for graph in graphs_of) > 6, "few are replayed"


def test_graphs_of_the_first_sizes_alone_are_kept(run, rollouts, graphs_of, monkeypatch):
    monkeypatch.setattr(captured, "MOST", 2)
    assert_same(*(ppo_from(run, rollouts, wanted) for wanted in (True, False)))
    assert len(graphs_of) == 2 and graphs_of[1].replays > 1


def test_few_sizes_hold_rows_as_long_as_those_of_hh():
    """In micro-batches of h100-mistral-7b v4, of two roles, with little that fills them up."""
    draw, table, options = random.Random(0), lengths_of_hh(), V4.recipe.options(Ppo)
    rows, prompt, response = options.per_device_train_batch_size, options.max_prompt_length, options.response_length
    most = sizes_of(pieces_of(Lengths([prompt] * rows, [response] * rows, None))[0])
    seen, real, filled = set(), 0, 0
    for _ in range(2000):
        drawn = [draw.choice(table) for _ in range(rows)]
        lengths = Lengths([min(p, prompt) for p, *_ in drawn], [min(c, response) for _, c, _ in drawn], None)
        sizes = sizes_of(pieces_of(lengths)[0])
        size = filled_sizes.filled_up(sizes, most)
        assert sizes.tokens < size.tokens < most.tokens + filled_sizes.UNIT
        seen.add((size, filled_sizes.filled_slots(max(lengths.response), response)))
        real, filled = real + sizes.tokens, filled + size.tokens
    assert 2 * len(seen) <= captured.MOST and filled < 1.12 * real


def grpo_from(run: StageRun, rollouts: list[Rollout], wanted: bool) -> Any:
    learner = group_learner.new_learner(
        run, "grpo", lean=True, per_device_train_batch_size=4, num_mini_batches=1, num_iterations=2, beta=0.1
    )
    rewards = torch.tensor(group_learner.REWARDS)
    judged = torch.ones(len(rewards), dtype=torch.bool)
    scored = [
        groups.ScoredRollout(
            rollout=rollout, by_name={"model": rewards}, scores=rewards, shaped_scores=rewards, judged=judged
        )
        for rollout in rollouts
    ]
    return trained_by(learner, lambda learner: (groups.make_batch(learner, each) for each in scored), wanted)


def test_grpo_learns_the_same_from_graphs(run, graphs_of):
    """The prompt of a group is computed once."""
    draw, tokenizer, numbers = torch.Generator().manual_seed(3), load_tokenizer(run.base), torch.arange(8) // 4
    rollouts = [replace(grouped_rollout(tokenizer, draw), prompt_numbers=numbers) for _ in range(STEPS)]
    assert_same(*(grpo_from(run, rollouts, wanted) for wanted in (True, False)))
    assert sum(max(0, graph.replays - 1) for graph in graphs_of) > 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_node_outlives_a_pass(run, rollouts, graphs_of, monkeypatch, checkpointing):
    """A node that adds to a gradient runs on the stream on which it was made: one of before would end a capture."""
    linear, add_gradient = LeanTrunk._linear, TrainState.add_gradient
    marked = []

    def marking(self: LeanTrunk, *args: Any, **options: Any) -> Tensor:
        result = linear(self, *args, **options)
        node: Any
        for node, _ in () if result.grad_fn is None else result.grad_fn.next_functions:
            if node is not None and node.name().endswith("AccumulateGrad"):
                node.metadata["mark"] = True
                marked.append(node.name())
        return result

    def checking(self: TrainState, *args: Any) -> Any:
        nodes: list[Any] = [torch.autograd.graph.get_gradient_edge(p).node for p in self.all_parameters]
        assert not any("mark" in node.metadata for node in nodes)
        return add_gradient(self, *args)

    monkeypatch.setattr(LeanTrunk, "_linear", marking)
    monkeypatch.setattr(TrainState, "add_gradient", checking)
    gc.disable()
    try:
        ppo_from(run, rollouts[:1], wanted=False, gradient_checkpointing=checkpointing)
    finally:
        gc.enable()
    assert marked


@contextmanager
def outside(graph: Any, **options: Any) -> Any:
    """A capture of nothing."""
    yield


def reads(learner: Any, *given: Any, add: Callable[..., Any] = ppo.Learner._add_critic_gradient) -> Any:
    result = add(learner, *given)
    result.values[0].item()
    return result


FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "stale adapters": (LeanTrunk, "casting_anew", lambda *_: outside(None), "differs by"),
    "nothing captured": (captured, "capturing", outside, "differs by"),
    "a read number": (ppo.Learner, "_add_critic_gradient", reads, "cannot hold"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_graph_that_errs_is_not_used(run, rollouts, graphs_of, fault, monkeypatch, capsys):
    owner, name, instead, message = FAULTS[fault]
    plain = ppo_from(run, rollouts[:1], wanted=False)
    monkeypatch.setattr(owner, name, instead)
    assert_same(ppo_from(run, rollouts[:1], wanted=True), plain)
    said = capsys.readouterr().err
    assert said.count("launch each kernel from now on") == 1 and message in said


@pytest.mark.parametrize(("share", "errs"), [(0.1, False), (0.5, True)])
def test_rounding_in_a_deep_model_is_no_error(share, errs):
    parameter, gradient, stats = torch.nn.Parameter(torch.zeros(2)), torch.ones(2), captured.weighted({"loss": ONE})
    shared: Any = None
    passes = captured.CapturedPasses(shared, shared, [parameter])
    passes._gradients[parameter] = gradient * (1 + share)
    with pytest.raises(RuntimeError, match="differs by") if errs else nullcontext():
        passes._compare(stats, stats, {parameter: gradient})


def test_a_graph_is_compared_by_a_gradient_of_usual_size(run, rollouts, graphs_of, monkeypatch, capsys):
    """Of a group of equal answers the gradient is nothing or rounding, which a graph that does nothing has too."""
    learner = ppo_learner.new_learner(run, per_device_train_batch_size=2, num_mini_batches=2, lean=True, kind="adapter")
    learner.state.capture_passes(True)
    passes, batch = learner.state.captured, ppo.make_batch(learner, rollouts[0])
    monkeypatch.setattr(captured, "capturing", outside)  # captures nothing
    assert passes is not None
    found = []
    for share in (1.0, 0.0, 1e-6, 1.0):  # of the advantages that the responses have
        scaled = replace(batch, advantages=share * batch.advantages)
        with learner.shared.role("policy"):
            learner.state.add_gradient(learner._add_policy_gradient, scaled.rows(torch.arange(2)), ONE, True)
        found.append(passes.given_up)
    assert found[:3] == [None] * 3 and "differs by 1 " in str(found[3])
    assert "launch each kernel from now on" in capsys.readouterr().err


REASONS: dict[str, tuple[dict[str, Any], Callable[[pytest.MonkeyPatch], None], str]] = {
    "cpu": ({}, lambda patch: patch.setitem(captured.CAPTURES_BY_DEVICE, "cpu", False), "needs a GPU"),
    "library": ({}, lambda _: None, "joined without padding"),
    "processes": ({}, lambda patch: patch.setattr(distributed, "world", lambda: 2), "processes"),
    "unpacked": ({"update_4bit": "unpacked"}, lambda _: None, "update_4bit"),
    "target": ({"kl_penalty": "loss", "kl_target": 0.1}, lambda _: None, "kl_target"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_cannot_be_captured_is_not_and_says_why(run, graphs_of, reason, monkeypatch, capsys):
    changes, change, message = REASONS[reason]
    learner = ppo_learner.new_learner(run, lean=reason != "library")
    learner.state.options = learner.state.options.model_copy(update=changes)
    change(monkeypatch)
    learner.state.capture_passes(True)
    said = capsys.readouterr().err
    assert learner.state.captured is None and said.count("note:") == 1 and message in said
