"""Rows of public sets and exports as rows of TRL's types (rlhf/data/parsing.py), by the columns that the sets document.

For other rows `data.format: my_rows:to_rows` names a function of the user's: it gets a row, a dict, and returns a list
of rows of one type. An adapter that returns no row leaves its row out, as a tie is.
"""

import importlib
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rlhf.data.raw import Malformed
from rlhf.data.transcripts import parse_hh
from rlhf.errors import UserError
from rlhf.recipe.choices import RowSet

RawRow = Mapping[str, Any]
Adapter = Callable[[RawRow], Sequence[dict[str, Any]]]

COLUMNS: dict[RowSet, tuple[str, ...]] = {  # by which `data.format: auto` knows a set; the first that fits is taken
    "hh": ("chosen", "rejected"),  # two texts, and no prompt
    "helpsteer3": ("context", "response1", "response2", "overall_preference"),
    "arena": ("conversation_a", "conversation_b", "winner"),
    "argilla": ("instruction", "generation-1", "generation-2", "preference.responses"),
    "ultrafeedback": ("instruction", "completions"),
    "distilabel": ("instruction", "generations", "ratings"),
    "alpaca": ("instruction", "output"),
    "openorca": ("system_prompt", "question", "response"),
    "sharegpt": ("conversations",),
    "gsm8k": ("question", "answer"),
}


def hh(row: RawRow) -> list[dict[str, Any]]:
    """HH-RLHF: two transcripts, or a transcript as the prompt. Turns of one speaker in a row are one turn."""

    def conversation(text: str) -> list[dict[str, str]]:
        spoken = groupby(parse_hh(text), key=lambda message: message.role)
        turns = [(role, "\n\n".join(filter(str.strip, (m.content for m in said)))) for role, said in spoken]
        return [{"role": role, "content": content} for role, content in turns]

    if "prompt" in row:
        return [{**row, "prompt": conversation(row["prompt"].rstrip().removesuffix("Assistant:").rstrip())}]
    return [{**row, **{key: conversation(row[key]) for key in COLUMNS["hh"]}}]


def alpaca(row: RawRow) -> list[dict[str, Any]]:
    """Alpaca: an instruction, an input below it where there is one, and the output."""
    extra = row.get("input") or ""
    asked = row["instruction"] + (f"\n{extra}" if extra.strip() else "")
    return [{**without(row, "instruction", "input", "output"), "prompt": asked, "completion": row["output"]}]


def sharegpt(row: RawRow) -> list[dict[str, Any]]:
    """ShareGPT: `conversations` of `from` and `value`."""
    roles = {"human": "user", "gpt": "assistant"}

    def message(turn: RawRow) -> dict[str, Any]:
        role, content = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        return {**without(turn, "from", "value"), "role": roles.get(str(role), role), "content": content}

    return [{**without(row, "conversations"), "messages": [message(turn) for turn in row["conversations"]]}]


def gsm8k(row: RawRow) -> list[dict[str, Any]]:
    """GSM8K: a question and a worked answer, which SFT imitates and rewards compare with."""
    answer = row["answer"] if isinstance(row["answer"], str | None) else str(row["answer"])
    return [{**without(row, "question"), "prompt": row["question"], "completion": answer}]


def ultrafeedback(row: RawRow) -> list[dict[str, Any]]:
    """UltraFeedback as published: `completions`, of which the best and the worst by the mean of their ratings."""
    rated = []
    for completion in row["completions"]:
        ratings = [aspect["Rating"] for aspect in completion["annotations"].values()]
        if numbers := [float(rating) for rating in ratings if rating not in (None, "N/A")]:
            rated.append((statistics.mean(numbers), completion["response"]))
    return best_and_worst(row["instruction"], rated, without(row, "instruction", "completions"))


def distilabel(row: RawRow) -> list[dict[str, Any]]:
    """Distilabel's UltraFeedback task: `generations` and as many `ratings`."""
    pairs = zip(row["ratings"], row["generations"], strict=True)
    rated = [(float(rating), text) for rating, text in pairs if rating is not None]
    return best_and_worst(row["instruction"], rated, without(row, "instruction", "generations", "ratings"))


def argilla(row: RawRow) -> list[dict[str, Any]]:
    """Argilla's flat export: two generations, and for each annotator which one is better; the majority decides."""
    names = "generation-1", "generation-2"
    votes: Counter[str] = Counter(row["preference.responses"])
    if votes[names[0]] == votes[names[1]]:
        return []
    better, worse = names if votes[names[0]] > votes[names[1]] else names[::-1]
    rest = without(row, "instruction", "preference.responses", *names)
    return [{**rest, "prompt": row["instruction"], "chosen": row[better], "rejected": row[worse]}]


def helpsteer3(row: RawRow) -> list[dict[str, Any]]:
    """HelpSteer3: `overall_preference` is below 0 for the first response and above 0 for the second."""
    strength = float(row["overall_preference"])
    better, worse = ("response1", "response2") if strength < 0 else ("response2", "response1")
    pair = {"prompt": row["context"], "chosen": row[better], "rejected": row[worse], "margin": abs(strength)}
    return [{**without(row, *COLUMNS["helpsteer3"]), **pair}] if strength else []


def arena(row: RawRow) -> list[dict[str, Any]]:
    """Chatbot Arena: two conversations, and the winner model_a or model_b."""
    sides = {"model_a": ("conversation_a", "conversation_b"), "model_b": ("conversation_b", "conversation_a")}
    if row["winner"] not in sides:
        return []
    better, worse = sides[row["winner"]]
    return [{**without(row, *COLUMNS["arena"]), "chosen": row[better], "rejected": row[worse]}]


def openorca(row: RawRow) -> list[dict[str, Any]]:
    """OpenOrca: a system prompt, which may be empty, a question and a response."""
    names = {"system": row["system_prompt"], "prompt": row["question"], "completion": row["response"]}
    return [{**without(row, *COLUMNS["openorca"]), **names}]


def best_and_worst(prompt: Any, rated: Sequence[tuple[float, Any]], rest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pair of the best and the worst rated answer, the first of each; none where they are rated alike."""
    best = max(rated, key=lambda answer: answer[0], default=(0.0, ""))
    worst = min(rated, key=lambda answer: answer[0], default=best)
    pair = {"prompt": prompt, "chosen": best[1], "rejected": worst[1], "margin": best[0] - worst[0]}
    return [{**rest, **pair}] if best[0] > worst[0] else []


def without(row: RawRow, *names: str) -> dict[str, Any]:
    """Return the other columns of a row."""
    return {name: value for name, value in row.items() if name not in names}


ADAPTERS: dict[RowSet, Adapter] = {
    "hh": hh,
    "alpaca": alpaca,
    "sharegpt": sharegpt,
    "gsm8k": gsm8k,
    "ultrafeedback": ultrafeedback,
    "distilabel": distilabel,
    "argilla": argilla,
    "helpsteer3": helpsteer3,
    "arena": arena,
    "openorca": openorca,
}


def own(name: str) -> tuple[Adapter, Path]:
    """Return the user's function `module:function` of the current folder, and its file. Raises UserError."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
        adapter: Adapter = getattr(found, function)
        return adapter, Path(str(found.__file__))
    except Exception as error:  # importing runs the user's code
        raise UserError(f"data.format: {name}: {type(error).__name__}: {error}; name module:function") from None
    finally:
        del sys.path[0]


def adapted(adapter: Adapter, row: RawRow) -> Sequence[dict[str, Any]]:
    """Return the rows that an adapter makes of a row. Raises Malformed where it fails."""
    try:
        made = adapter(row)
    except Malformed:
        raise
    except Exception as error:  # whatever a row of another set leads to
        raise Malformed(f"data.format {adapter.__name__} cannot read it ({type(error).__name__}: {error})") from None
    if not isinstance(made, list) or not all(isinstance(row, dict) for row in made):
        raise Malformed(f"data.format {adapter.__name__} returned {type(made).__name__}, and no list of rows")
    return made
