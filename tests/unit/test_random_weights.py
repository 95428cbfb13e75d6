"""Random weights and stand-in dialogues: the same every time, as long as they should be; and bases that are refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf import recipe
from rlhf.cli.choice import Choice
from rlhf.data import formats, tokenize
from rlhf.data.pairs import encode_pairs
from rlhf.data.rows import PreferencePair, of_kind
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.data.worlds import lengths
from rlhf.errors import UserError
from rlhf.models import loading
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.chain import differences
from rlhf.recipe.choices import LengthsShape
from rlhf.recipe.rehearsal import random_weights_changes
from rlhf.recipe.schema import Dpo, Rm
from rlhf.recipe.schema_online import Ppo
from rlhf.run.directory import StageRun
from tests.helpers import RECIPE, SMALL

CPU = torch.device("cpu")
VOCAB = 400
ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPE = {f"model.architecture.{key}": value for key, value in ARCHITECTURE.items()}


def random_recipe(shape: LengthsShape = "hh", pairs: int = 30, seed: int | None = None, **changes) -> PinnedRecipe:
    """The CPU recipe with random weights; `changes` name keys with double underscores."""
    base = recipe.load(RECIPE, SMALL | SHAPE).recipe
    overrides = SMALL | SHAPE | random_weights_changes(base, pairs, shape)
    return recipe.load(RECIPE, overrides | {key.replace("__", "."): value for key, value in changes.items()}, seed)


def weights(loaded: PinnedRecipe, out: Path, **options) -> dict[str, torch.Tensor]:
    return load_base(StageRun(out, loaded, "sft").base, CPU, **options).state_dict()


# -- weights -----------------------------------------------------------------------------------------------------------


def test_two_loads_give_the_same_weights(tmp_path):
    """Whatever torch's generator has given before, and it goes on as if nothing had been drawn."""
    torch.manual_seed(1)
    first = weights(random_recipe(), tmp_path)
    after = torch.rand(3)
    torch.manual_seed(2)
    second = weights(random_recipe(), tmp_path)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), after)


def test_a_reward_model_stands_on_the_same_base(tmp_path):
    """The weights below the head are those that the other stages have."""
    language, scores = (weights(random_recipe(), tmp_path, head=head) for head in ("lm", "score"))
    below = {name for name in language if name.startswith("model.")}
    assert below == {name for name in scores if name.startswith("model.")}
    assert all(torch.equal(language[name], scores[name]) for name in below)
    assert scores["score.weight"].shape == (1, 64)


def test_weights_have_the_recipe_s_shape_type_and_spread(tmp_path):
    loaded = random_recipe(model__dtype="bfloat16")
    model = load_base(StageRun(tmp_path, loaded, "sft").base, CPU)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.get_input_embeddings().weight.shape == (VOCAB, 64)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight, "tied, as the recipe says"
    assert len(model.model.layers) == 2
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            assert parameter.float().std().item() == pytest.approx(0.02, rel=0.1), name
        else:
            assert (parameter == 1).all(), name
    untied = random_recipe(model__architecture__tie_word_embeddings=False)
    model = load_base(StageRun(tmp_path, untied, "sft").base, CPU)
    rows, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert isinstance(rows, torch.Tensor) and not torch.equal(rows, head)


def test_a_random_base_has_the_frequencies_of_its_positions(tmp_path):
    """The frequencies of the rotary embedding are there, although no checkpoint holds them."""
    model = load_base(StageRun(tmp_path, random_recipe(), "sft").base, CPU)
    frequencies = model.model.rotary_emb.inv_freq
    assert frequencies.tolist() == pytest.approx([10_000 ** (-2 * i / 16) for i in range(8)])


@pytest.mark.parametrize("head", ["lm", "score"])
def test_a_4_bit_base_packs_the_matrices_of_its_layers_and_no_head(tmp_path, head):
    """Packed are all matrices of the layers, with scales that are packed themselves; heads and embedding are not."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    loaded = random_recipe(model__quantization="nf4", model__dtype="bfloat16")
    model = load_base(StageRun(tmp_path, loaded, "sft").base, CPU, head=head)
    model.config.pad_token_id = 0
    packed = {name for name, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    linear = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert linear - packed == {"lm_head" if head == "lm" else "score"}
    assert len(packed) == 2 * 7
    for name in packed:
        weight: Any = model.get_submodule(name).weight
        assert weight.dtype == torch.uint8
        assert weight.quant_state.nested
        assert weight.quant_state.quant_type == "nf4"
        assert weight.numel() == math.prod(weight.quant_state.shape) / 2, "two to a byte"
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    again = load_base(StageRun(tmp_path, loaded, "sft").base, CPU, head=head)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, again.model.layers[0].mlp.up_proj.weight)
    out = model(input_ids=torch.arange(10)[None])
    assert out.logits.isfinite().all()
    whole = load_base(StageRun(tmp_path, loaded, "sft").base, CPU, quantize=False)
    assert whole.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


def test_a_4_bit_base_keeps_its_biases(tmp_path):
    """Of Qwen2, whose queries, keys and values have some."""
    pytest.importorskip("bitsandbytes")
    loaded = random_recipe(model__quantization="nf4", model__architecture__model_type="qwen2")
    model = load_base(StageRun(tmp_path, loaded, "sft").base, CPU)
    assert model.model.layers[0].self_attn.q_proj.bias.tolist() == [0.0] * 64
    assert model(input_ids=torch.arange(10)[None]).logits.isfinite().all()


# -- bases that are refused --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in a folder."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = LlamaConfig(**ARCHITECTURE, vocab_size=VOCAB, max_position_embeddings=512, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def local(folder: Path, **changes) -> PinnedRecipe:
    """The CPU recipe on a local checkpoint."""
    base = SHAPE | {
        "pretrain": None,
        "model.source": "local",
        "model.name": str(folder),
        "model.architecture.vocab_size": VOCAB,
        "tokenizer": {"source": "local", "name": str(folder), "template": "hh"},
    }
    return recipe.load(RECIPE, base | {key.replace("__", "."): value for key, value in changes.items()})


def test_a_checkpoint_of_the_recipe_s_shape_is_taken(checkpoint, tmp_path):
    assert load_base(StageRun(tmp_path, local(checkpoint), "sft").base, CPU).config.num_hidden_layers == 2
    any_vocabulary = local(checkpoint, model__architecture__vocab_size=None)
    assert load_base(StageRun(tmp_path, any_vocabulary, "sft").base, CPU).config.vocab_size == VOCAB


@pytest.mark.parametrize(
    ("key", "value", "real"),
    [
        ("num_hidden_layers", 3, 2),
        ("vocab_size", 401, 400),
        ("tie_word_embeddings", False, True),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused_by_the_key(checkpoint, tmp_path, key, value, real):
    loaded = local(checkpoint, **{f"model__architecture__{key}": value})
    with pytest.raises(UserError) as caught:
        load_base(StageRun(tmp_path, loaded, "sft").base, CPU)
    assert f"{checkpoint} has {key} {real}" in str(caught.value)
    assert f"model.architecture.{key} is {value}" in str(caught.value)


# -- dialogues ---------------------------------------------------------------------------------------------------------


def written(folder: Path, **options) -> list[PreferencePair]:
    file = folder / "pairs.jsonl"
    changes: dict[str, Any] = {"pairs": 40, "shape": "hh", "longest": 64, "seed": 0} | options
    lengths.write(folder, **changes)
    rows = formats.read([file])
    assert [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    return of_kind(rows.rows, PreferencePair)


@pytest.mark.parametrize("vocab", [300, 32_000])
def test_dialogues_have_the_tokens_that_they_are_meant_to_have(tmp_path, vocab):
    """Prompts with BOS and both marks of a turn, responses and their EOS."""
    tokenizer = DialogueTokenizer(tokenize.words(vocab), "hh")
    table = lengths.lengths_of_hh()
    for pair in written(tmp_path, pairs=150):
        (chosen, rejected), counts = tokenizer.encode(
            [(pair.prompt, pair.chosen), (pair.prompt, pair.rejected)], 2000, 4000
        )
        assert chosen and rejected and chosen.prompt == rejected.prompt
        sizes = len(chosen.prompt), len(chosen.response) - 1, len(rejected.response) - 1
        assert sizes in table
        assert chosen.response[-1] == tokenizer.eos_id
        assert sum(counts.values()) == 0


def test_the_longest_dialogues_fill_every_stage_s_limits(tmp_path):
    loaded = random_recipe(
        "longest",
        sft__max_length=100,
        sft__max_prompt_length=60,
        rm__max_length=400,
        rm__max_prompt_length=5,
        dpo__max_length=400,
        dpo__max_prompt_length=395,
        ppo__max_prompt_length=90,
        ppo__response_length=20,
    )
    tokenizer = load_tokenizer(StageRun(tmp_path, loaded, "sft").base)
    pairs = written(tmp_path, shape="longest", longest=loaded.recipe.longest(), pairs=9)
    for stage in (loaded.recipe.options(Rm), loaded.recipe.options(Dpo)):
        for both in encode_pairs(tokenizer, pairs, stage)[0]:
            for side in both:
                assert len(side.prompt) == stage.max_prompt_length
                assert len(side.prompt + side.response) == stage.max_length
    rows, _ = tokenizer.encode([(p.prompt, p.chosen) for p in pairs], 60, 100)
    assert {(len(row.prompt), len(row.prompt + row.response)) for row in rows if row} == {(60, 100)}
    prompts, cut = tokenizer.encode_prompts([p.prompt for p in pairs], loaded.recipe.options(Ppo).max_prompt_length)
    assert ({len(ids) for ids in prompts}, cut) == ({90}, 9)


def test_dialogues_are_a_function_of_the_seed_and_their_prompts_differ(tmp_path):
    first, again, other = (written(tmp_path, seed=seed, pairs=300) for seed in (0, 0, 1))
    assert [p.prompt for p in first] == [p.prompt for p in again]
    assert [p.prompt for p in first] != [p.prompt for p in other]
    assert len({p.prompt for p in first}) == 300


# -- the option --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("directory", recipe.available(RECIPE.parents[1]), ids=lambda d: f"{d.parent.name}-{d.name}")
def test_every_recipe_can_have_random_weights(directory):
    """And keeps everything that decides memory and speed."""
    loaded, before = Choice(recipe=directory, weights="random").load(), recipe.load(directory)
    changed = differences(before.recipe.model_dump(mode="json"), loaded.recipe.model_dump(mode="json"))
    kept = {"pretrain", "model.source", "model.architecture.vocab_size", "data.source", "data.lengths"}
    kept |= {
        "model.revision",
        "model.files",
        "model.sha256",
        *(f"data.{key}" for key in ("name", "revision", "data_dir", "split")),
    }
    assert {key for key in changed if not key.startswith(("tokenizer", "pretrain", "data.lengths"))} <= kept


def test_a_new_bfloat16_base_keeps_its_rotary_frequencies_in_float32():
    """They are computed and not stored, and bfloat16 would round the angle of each position."""
    architecture = recipe.load(RECIPE, SMALL).recipe.model.architecture
    assert architecture
    tokenizer = DialogueTokenizer(tokenize.words(VOCAB), "hh")
    bases = {dtype: loading.new_base(architecture, tokenizer, dtype) for dtype in ("float32", "bfloat16")}
    assert {p.dtype for p in bases["bfloat16"].parameters()} == {torch.bfloat16}
    whole, half = (bases[dtype].model.rotary_emb.inv_freq for dtype in ("float32", "bfloat16"))
    assert half.dtype == torch.float32 and torch.equal(half, whole)
