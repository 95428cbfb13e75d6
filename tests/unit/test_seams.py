"""What a rehearsal does once for all stages and depths."""

from types import SimpleNamespace

import pytest

from bench.peaks import alone
from rlhf.plan.phases import PHASES
from rlhf.plan.rehearsal import seams
from rlhf.plan.rehearsal.meta_runs import Rehearsals
from rlhf.plan.rehearsal.work import Counting
from tests.helpers import run_stages
from tests.invariants.tiny import VOCAB, tiny


def tokenizer() -> SimpleNamespace:
    return SimpleNamespace(hf=object())


def test_each_text_is_encoded_once_per_tokenizer():
    encoded = []

    def encode(tokenizer, texts, bos):
        encoded.extend(texts)
        return [[int(bos), len(text)] for text in texts]

    ids = seams._encoded_once(encode)
    first, second = tokenizer(), tokenizer()
    assert ids(first, ["a", "bb", "a"], True) == [[1, 1], [1, 2], [1, 1]]
    assert encoded == ["a", "bb"]
    assert ids(first, ["bb", "ccc"], True) == [[1, 2], [1, 3]]
    assert encoded == ["a", "bb", "ccc"]
    assert ids(first, ["a"], False) == [[0, 1]], "without BOS is another question"
    ids(second, ["a"], True)
    assert encoded[3:] == ["a", "a"], "and so is another tokenizer"
    assert ids(first, [], True) == []


def test_whoever_changes_the_ids_of_a_text_changes_no_other():
    ids = seams._encoded_once(lambda tokenizer, texts, bos: [[1, 2] for _ in texts])
    one = tokenizer()
    ids(one, ["a"], True)[0].append(3)
    assert ids(one, ["a", "a"], True) == [[1, 2], [1, 2]]


def test_a_tokenizer_is_made_once_for_a_vocabulary_and_comes_without_a_template():
    made = []

    def words(vocab_size):
        made.append(vocab_size)
        return SimpleNamespace(chat_template=None)

    tokenizer = seams._made_once(words)
    first = tokenizer(100)
    first.chat_template = "written by merging"
    assert tokenizer(100) is first and first.chat_template is None
    assert tokenizer(200) is not first
    assert made == [100, 200]


@pytest.mark.parametrize(
    ("prompts", "shorter"),
    [([[1, 2], [1, 2]], [[1], [1, 2]]), ([[1, 2]], [[1, 2]]), ([[1], [1, 2]], [[1], [1, 2]])],
)
def test_one_of_several_prompts_is_shorter_so_that_there_is_a_mask(prompts, shorter):
    """A prompt alone has none to be padded for."""
    started = []
    seams._with_shorter_prompt(lambda engine, model, prompts: started.append(prompts))(None, None, prompts)
    assert started == [shorter]


@pytest.mark.parametrize("seam", seams.seams(), ids=lambda seam: f"{seam.owner.__name__}.{seam.name}")
def test_a_function_that_a_rehearsal_replaces_is_where_the_table_says(seam):
    assert callable(getattr(seam.owner, seam.name)), seam.why


def test_the_functions_are_as_before_after_a_rehearsal():
    table = seams.seams()
    before = [getattr(seam.owner, seam.name) for seam in table]
    with seams.with_seams():
        assert all(getattr(seam.owner, seam.name) is not was for seam, was in zip(table, before, strict=True))
    assert [getattr(seam.owner, seam.name) for seam in table] == before


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_further_minibatches_take_no_more_memory(tmp_path):
    """PPO as a user runs it, 16 updates in two steps, beside its rehearsal, which has two updates in each step.

    The real run has neither a rehearsal's seams nor its changes.
    """
    loaded = tiny(2, ppo__steps=2, ppo__num_mini_batches=4, ppo__num_ppo_epochs=2, ppo__per_device_train_batch_size=2)
    run_stages(loaded, tmp_path, "sft", "rm")
    with alone(), Counting("cpu", PHASES, VOCAB) as tracker:
        run_stages(loaded, tmp_path, "ppo")
    with seams.with_seams():
        rehearsed = Rehearsals(None)(loaded, "ppo")
    real = tracker.worked_peaks()
    assert real["update"].work.launched > 3 * rehearsed["update"].work.launched
    for phase, close in (("rollout", 0.01), ("score", 0.005), ("update", 0.005)):
        assert rehearsed[phase].bytes == pytest.approx(real[phase].bytes, rel=close), phase
