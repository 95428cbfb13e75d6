"""Random weights and stand-in dialogues: the same every time, as long as they should be; and bases that are refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from rlhf import recipe
from rlhf.cli.choice import Choice
from rlhf.data import formats, tokenize
from rlhf.data.pairs import encode_pairs
from rlhf.data.rows import PreferencePair
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.data.worlds import lengths
from rlhf.errors import UserError
from rlhf.models import loading
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.chain import differences
from rlhf.recipe.choices import LengthsShape
from rlhf.recipe.schema import Dpo, Rm
from rlhf.recipe.schema_online import Ppo
from rlhf.recipe.small import random_weights_changes
from rlhf.run.directory import StageRun
from tests.helpers import RECIPE, SMALL, run_stages

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


def test_another_seed_gives_other_weights(tmp_path):
    first, second = (weights(random_recipe(seed=seed), tmp_path) for seed in (0, 1))
    drawn = [name for name in first if first[name].dim() > 1]
    assert drawn and not any(torch.equal(first[name], second[name]) for name in drawn)


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


def test_a_mistral_can_be_random_too(tmp_path):
    changes: dict[str, Any] = {"model__architecture__model_type": "mistral"}
    changes["model__architecture__sliding_window"] = 64
    model = load_base(StageRun(tmp_path, random_recipe(**changes), "sft").base, CPU)
    assert isinstance(model, MistralForCausalLM)
    assert model.config.sliding_window == 64
    assert model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.isfinite().all()


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


def test_a_chain_runs_on_random_weights(tmp_path):
    """And twice gives the same: the weights are made anew for every stage."""
    changes: dict[str, Any] = {"sft__max_steps": 2, "rm__max_steps": 2, "sft__logging_steps": 1, "rm__logging_steps": 1}
    loaded = random_recipe(pairs=80, **changes)
    first, second = (run_stages(loaded, tmp_path / name, "sft", "rm") for name in ("a", "b"))
    assert first["metrics"] == second["metrics"]
    assert first["result_sha256"] == second["result_sha256"]


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
        ("hidden_size", 128, 64),
        ("intermediate_size", 64, 128),
        ("num_key_value_heads", 4, 2),
        ("vocab_size", 401, 400),
        ("max_position_embeddings", 1024, 512),
        ("tie_word_embeddings", False, True),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused_by_the_key(checkpoint, tmp_path, key, value, real):
    loaded = local(checkpoint, **{f"model__architecture__{key}": value})
    with pytest.raises(UserError) as caught:
        load_base(StageRun(tmp_path, loaded, "sft").base, CPU)
    assert str(caught.value) == (
        f"{checkpoint} has {key} {real}, the recipe says {value} (model.architecture.{key}): for a model of another "
        f"architecture `rlhf new --model {checkpoint}` writes a recipe"
    )


def test_a_checkpoint_of_another_type_is_refused_with_the_way_out(checkpoint, tmp_path):
    loaded = local(checkpoint, model__architecture__model_type="mistral")
    with pytest.raises(UserError, match=r"is a llama model: make a recipe for it with `rlhf new`"):
        load_base(StageRun(tmp_path, loaded, "sft").base, CPU)


def test_a_sliding_window_that_the_recipe_does_not_know_is_refused(tmp_path):
    """It decides how long a response may be."""
    folder = tmp_path / "mistral"
    config = MistralConfig(**ARCHITECTURE, vocab_size=VOCAB, max_position_embeddings=512, sliding_window=64)
    MistralForCausalLM(config).save_pretrained(folder)
    changes = {"model__architecture__model_type": "mistral", "model__architecture__tie_word_embeddings": False}
    with pytest.raises(UserError, match=r"has sliding_window 64, the recipe says None .*: .* `rlhf new --model"):
        load_base(StageRun(tmp_path, local(folder, **changes), "sft").base, CPU)
    known = local(folder, **changes, model__architecture__sliding_window=64)
    assert load_base(StageRun(tmp_path, known, "sft").base, CPU).config.sliding_window == 64


HUB = {
    "pretrain": None,
    "model.source": "hub",
    "model.name": "meta-llama/Llama-2-7b-hf",
    "model.revision": "0" * 40,
    "tokenizer": {"source": "hub", "name": "meta-llama/Llama-2-7b-hf", "revision": "0" * 40, "template": "hh"},
}
PAGE = "https://huggingface.co/meta-llama/Llama-2-7b-hf"


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        (
            "You are trying to access a gated repo.\nMake sure to have access to it",
            f"{PAGE} is gated: accept its licence there, then `hf auth login` or set HF_TOKEN",
        ),
        ("401 Client Error: Unauthorized for url", f"{PAGE} is gated: accept its licence there"),
        ("403 Client Error. Forbidden", "`hf auth login`"),
        (
            "Revision Not Found for url: x",
            f"revision {'0' * 40} is not there: copy a commit from {PAGE}/commits",
        ),
        ("0000 is not a valid git identifier (branch name, tag name or commit id)", f"{PAGE}/commits"),
        (
            "We couldn't connect to 'https://huggingface.co' to load the files",
            "without network, use a local folder: --weights DIR",
        ),
    ],
)
def test_what_the_hub_refuses_comes_with_the_way_out(tmp_path, monkeypatch, answer, advice):
    def refuse(name, **options):
        assert (name, options["revision"]) == ("meta-llama/Llama-2-7b-hf", "0" * 40)
        raise OSError(answer)

    monkeypatch.setattr("rlhf.models.loading.AutoConfig.from_pretrained", refuse)
    with pytest.raises(UserError) as caught:
        load_base(StageRun(tmp_path, recipe.load(RECIPE, HUB), "sft").base, CPU)
    message = str(caught.value)
    assert message.startswith("cannot load the base model meta-llama/Llama-2-7b-hf: ")
    assert advice in message
    assert answer.split("\n")[0] in message, "what the hub said is still there"
    assert "\n" not in message


def test_the_reason_may_stand_in_what_caused_the_error(tmp_path, monkeypatch):
    """transformers says that it found nothing, and the hub's own answer lies below."""

    def refuse(name, **options):
        raise OSError("x is not a local folder and is not a valid model identifier") from ValueError("401 Unauthorized")

    monkeypatch.setattr("rlhf.models.loading.AutoConfig.from_pretrained", refuse)
    with pytest.raises(UserError, match="is gated: accept its licence there"):
        load_base(StageRun(tmp_path, recipe.load(RECIPE, HUB), "sft").base, CPU)


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        ("503 Server Error for url: https://huggingface.co/api/models/x/revision/0123", "use a local folder"),
        ("request 40123 timed out after 403 ms", "use a local folder"),
        (
            "Offline mode is enabled.",
            "is enabled; repeat this where there is network; `rlhf fetch`",
        ),
    ],
)
def test_an_address_or_a_number_is_no_diagnosis(tmp_path, monkeypatch, answer, advice):
    def refuse(name, **options):
        raise OSError(answer)

    monkeypatch.setattr("rlhf.models.loading.AutoConfig.from_pretrained", refuse)
    with pytest.raises(UserError) as caught:
        load_base(StageRun(tmp_path, recipe.load(RECIPE, HUB), "sft").base, CPU)
    assert advice in str(caught.value)


def test_a_tokenizer_that_the_hub_refuses_comes_with_the_way_out(tmp_path, monkeypatch):
    def refuse(*what, **options):
        raise OSError("You are trying to access a gated repo.")

    monkeypatch.setattr("rlhf.data.tokenize.AutoTokenizer.from_pretrained", refuse)
    with pytest.raises(UserError, match=f"cannot load the tokenizer .*{PAGE} is gated: accept its licence there"):
        load_tokenizer(StageRun(tmp_path, recipe.load(RECIPE, HUB), "sft").base)


def test_a_local_folder_s_error_is_not_the_hub_s(tmp_path):
    with pytest.raises(UserError) as caught:
        load_base(StageRun(tmp_path, local(tmp_path / "nothing"), "sft").base, CPU)
    assert str(caught.value).startswith(f"cannot load the base model {tmp_path / 'nothing'}: ")
    assert "gated" not in str(caught.value) and "commits" not in str(caught.value)


# -- dialogues ---------------------------------------------------------------------------------------------------------


def written(folder: Path, **options) -> tuple[PreferencePair, ...]:
    file = folder / "pairs.jsonl"
    changes: dict[str, Any] = {"pairs": 40, "shape": "hh", "longest": 64, "seed": 0} | options
    lengths.write(file, **changes)
    rows = formats.read([file])
    assert [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    return rows.pairs


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


def test_a_stand_in_tokenizer_has_as_many_ids_as_it_is_asked_for():
    """And every word that dialogues are made of has one of its own, where there are enough."""
    for vocab in (300, 32_000):
        made = tokenize.words(vocab)
        assert len(made) == vocab
        assert max(made.get_vocab().values()) == vocab - 1
    ids = made(" ".join(map(str, range(lengths.WORDS))), add_special_tokens=False)["input_ids"]
    assert len(set(ids)) == len(ids) == lengths.WORDS
    assert not {made.pad_token_id, made.eos_token_id, made.bos_token_id} & set(ids)


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


def test_the_table_has_the_means_that_it_says():
    """136, 43 and 53 tokens of prompts, chosen and rejected responses, within 5 %."""
    table = lengths.lengths_of_hh()
    assert len(table) == 200
    means = [sum(column) / len(table) for column in zip(*table, strict=True)]
    assert means == [pytest.approx(mean, rel=0.05) for mean in (136, 43, 53)]
    assert min(min(row) for row in table) >= 1
    assert min(prompt for prompt, _, _ in table) > lengths.PROMPT_OVERHEAD


def test_dialogues_are_a_function_of_the_seed_and_their_prompts_differ(tmp_path):
    first, again, other = (written(tmp_path, seed=seed, pairs=300) for seed in (0, 0, 1))
    assert [p.prompt for p in first] == [p.prompt for p in again]
    assert [p.prompt for p in first] != [p.prompt for p in other]
    assert len({p.prompt for p in first}) == 300


# -- the option --------------------------------------------------------------------------------------------------------


def test_weights_from_nowhere_are_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match=r"--weights .*: no config.json there; name a checkpoint's folder"):
            Choice(directory=RECIPE, weights=str(folder)).load()


def test_random_weights_mark_the_run_modified():
    loaded = Choice(directory=RECIPE, weights="random").load()
    assert loaded.modified
    assert loaded.sha256 == recipe.load(RECIPE).sha256, "of the file as it is released"
    changed = loaded.recipe
    assert (changed.model.source, changed.tokenizer.source, changed.data.source) == ("random", "words", "lengths")
    assert changed.pretrain is None
    assert changed.model.architecture
    assert changed.tokenizer.vocab_size == changed.model.architecture.vocab_size == 800
    assert not Choice(directory=RECIPE).load().modified


@pytest.mark.parametrize("directory", recipe.available(RECIPE.parents[1]), ids=lambda d: f"{d.parent.name}-{d.name}")
def test_every_recipe_can_have_random_weights(directory):
    """And keeps everything that decides memory and speed."""
    loaded, before = Choice(directory=directory, weights="random").load(), recipe.load(directory)
    changed = differences(before.recipe.model_dump(mode="json"), loaded.recipe.model_dump(mode="json"))
    kept = {"pretrain", "model.source", "model.architecture.vocab_size", "data.source", "data.lengths"}
    kept |= {
        "model.revision",
        "model.files",
        "model.sha256",
        *(f"data.{key}" for key in ("name", "revision", "data_dir", "split")),
    }
    assert {key for key in changed if not key.startswith(("tokenizer", "pretrain", "data.lengths"))} <= kept


def test_files_take_the_place_of_the_hub(tmp_path):
    """The recipe names a set, its commit and a part of it; none of them is about the files."""
    file = tmp_path / "mine.jsonl"
    file.write_text("{}\n")
    for name in ("4090-llama2-7b/v1", "4090-qwen3-8b/v2"):
        loaded = Choice(directory=RECIPE.parents[1] / name, data=(str(file),)).load()
        assert (loaded.recipe.data.source, loaded.recipe.data.files) == ("files", (str(file),))
        assert loaded.recipe.data.own_keys() == []
    changes = {"data.source": "files", "data.files": [str(file)], "data.format": "auto"}
    assert Choice(directory=RECIPE, data=(str(file),)).load().overrides == changes, "nothing to remove"


def test_a_local_folder_takes_the_place_of_the_hub(checkpoint):
    directory = RECIPE.parents[1] / "4090-llama2-7b" / "v1"
    loaded = Choice(directory=directory, weights=str(checkpoint)).load()
    assert (loaded.recipe.model.source, loaded.recipe.model.name) == ("local", str(checkpoint))
    assert (loaded.recipe.tokenizer.source, loaded.recipe.tokenizer.name) == ("local", str(checkpoint))
    assert (loaded.recipe.model.revision, loaded.modified) == (None, True)


def test_random_weights_need_an_architecture():
    loaded = recipe.load(RECIPE)
    without = loaded.recipe.model_copy(update={"model": loaded.recipe.model.model_copy(update={"architecture": None})})
    with pytest.raises(UserError, match=r"random weights need model.architecture"):
        random_weights_changes(without, 10, "hh")


def test_a_new_bfloat16_base_keeps_its_rotary_frequencies_in_float32():
    """They are computed and not stored, and bfloat16 would round the angle of each position."""
    architecture = recipe.load(RECIPE, SMALL).recipe.model.architecture
    assert architecture
    tokenizer = DialogueTokenizer(tokenize.words(VOCAB), "hh")
    bases = {dtype: loading.new_base(architecture, tokenizer, dtype) for dtype in ("float32", "bfloat16")}
    assert {p.dtype for p in bases["bfloat16"].parameters()} == {torch.bfloat16}
    whole, half = (bases[dtype].model.rotary_emb.inv_freq for dtype in ("float32", "bfloat16"))
    assert half.dtype == torch.float32 and torch.equal(half, whole)
