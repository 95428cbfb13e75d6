"""Folders of local models: config, tokenizer, chat template, weights, index, pickles, remote code; then training."""

import json
import pickle
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy
from safetensors.numpy import load_file, save_file

from tests.fuzz.groups.adapters import Executed
from tests.fuzz.groups.data_files import lines, rows_of
from tests.fuzz.groups.run_dirs import spoil
from tests.fuzz.mutate import TEXTS, damage
from tests.fuzz.oracle import CANARY, SOUND, Case
from tests.fuzz.reference import Reference, finite_result

# Values of config.json that a loader could believe.
CONFIG: dict[str, tuple[Any, ...]] = {
    "vocab_size": (-5, 0, 10**12, 10, "400"),
    "hidden_size": ("x", 0, -32, 31, 10**9),
    "num_hidden_layers": (10**9, 0, -1, 1, 3),
    "num_attention_heads": (0, 7, -2),
    "num_key_value_heads": (0,),
    "intermediate_size": (10**15, None),
    "head_dim": (0, 10**9),
    "quantization_config": (
        {"quant_method": "evil"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 4},
        [],
    ),
    "rope_scaling": ({"type": "evil"},),
    "rope_parameters": ({"rope_type": "evil"}, {"rope_type": "default", "rope_theta": 0}),
    "rope_theta": (0, "x"),
    "rms_norm_eps": (-1, "x"),
    "max_position_embeddings": (0, 1, 10**12),
    "model_type": ("evil", "bert", None, "t5"),
    "architectures": (["Evil"], None),
    "hidden_act": ("evil",),
    "tie_word_embeddings": (False,),
    "torch_dtype": ("evil",),
    "dtype": ("evil", "float16"),
    "pad_token_id": (10**9,),
    "eos_token_id": (-7, [0, 10**9]),
    "bos_token_id": ("x",),
    "attention_bias": (True,),
    "mlp_bias": (True,),
    "initializer_range": (-1,),
    "is_encoder_decoder": (True,),
    "auto_map": ({"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},),
}
TEMPLATES = (
    "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    f"{{{{ cycler.__init__.__globals__.os.system('touch {CANARY}') }}}}",
    "{% if %}",
    "{% for m in messages %}{{ m.content }}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception('\x1b[31mno\\nerror: twice') }}",
    "{{ messages[99].content }}",
    "{{ undefined.attribute }}",
    "the same for everything",
    "",
    "{{ 1 / 0 }}",
    "{% include 'config.json' %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
)


def case(random: Random, place: Path, reference: Reference) -> Case:
    model = place / "model"
    shutil.copytree(reference.root / "pretrain" / "model", model)
    kind = random.random()
    must: Any = "either"
    options: list[str] = []
    if random.random() < SOUND:
        name, must = "as it should be", "accept"
    elif kind < 0.35:
        name = _config(random, model)
    elif kind < 0.5:
        target = random.choice(
            [model / n for n in ("tokenizer.json", "tokenizer_config.json", "generation_config.json")]
        )
        name = f"{target.name}: {spoil(random, target)}"
    elif kind < 0.65:
        template = random.choice(TEMPLATES)
        file = model / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
        name = f"the chat template {template[:60]!r}"
        options = ["--set", "tokenizer.template=chat"]
    else:
        name, must = _weights(random, model)
    if options or random.random() < 0.3:
        (place / "rows.jsonl").write_bytes(lines(rows_of("messages")))
        options += ["--data", "rows.jsonl"]
    arguments = ["run", "sft", *reference.options(), "--weights", "model", *options]
    found = Case(f"run sft --weights, {name}", arguments, place, must=must)
    found.valid = lambda outcome: finite_result(next(place.glob("out/*/v*/sft")))
    return found


def _config(random: Random, model: Path) -> str:
    file = model / "config.json"
    if random.random() < 0.3:
        return f"config.json: {spoil(random, file)}"
    key = random.choice(list(CONFIG))
    value = random.choice(CONFIG[key])
    if key == "auto_map":
        (model / "evil.py").write_text(f"open({CANARY!r}, 'w').close()\n")
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    return f"{key} = {json.dumps(value)}"


def _weights(random: Random, model: Path) -> tuple[str, Any]:
    """Damage the weights; returns what was done and whether it must be refused."""
    file = model / "model.safetensors"
    kind = random.randrange(10)
    if kind < 4:
        tensors = load_file(file)
        key = random.choice(sorted(tensors))
        if kind == 0:
            tensors[key].reshape(-1)[random.randrange(tensors[key].size)] = random.choice((numpy.nan, numpy.inf))
            name = f"a value of {key} is not finite"
        elif kind == 1:
            del tensors[key]
            name = f"{key} is missing"
        elif kind == 2:
            tensors["evil.weight"] = tensors[key]
            name = "a key too many"
        else:
            tensors[key] = tensors[key][:-1]
            name = f"{key} has the shape {tensors[key].shape}"
        save_file(tensors, file, metadata={"format": "pt"})
        return name, "either" if kind == 2 else "refuse"
    if kind == 4:
        return f"{file.name}: {_damage(random, file)}", "either"
    if kind in (5, 6):
        content = pickle.dumps({"model.embed_tokens.weight": Executed()})
        if kind == 5:
            file.unlink()
            (model / "pytorch_model.bin").write_bytes(content)
            return "a pickle as pytorch_model.bin", "refuse"
        file.write_bytes(content)
        return "a pickle in place of the weights", "refuse"
    if kind == 7:
        file.unlink()
        return "no weights", "refuse"
    parts: Any = random.choice((
        {}, [], {"weight_map": {}}, {"metadata": {}, "weight_map": {"model.norm.weight": "../../x.safetensors"}},
        {"metadata": {}, "weight_map": {"model.norm.weight": "no.safetensors"}}, {"metadata": None, "weight_map": None},
        {"metadata": {}, "weight_map": {"model.norm.weight": random.choice(TEXTS)}},
    ))  # fmt: skip
    file.rename(model / "other.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(parts))
    return f"the index {json.dumps(parts)[:80]}", "refuse"


def _damage(random: Random, file: Path) -> str:
    name, content = damage(random, file.read_bytes())
    file.write_bytes(content)
    return name
