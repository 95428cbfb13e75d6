"""Run directories: one value, line or byte range of a finished run's JSON and JSONL files, then what reads them."""

import json
from html.parser import HTMLParser
from pathlib import Path
from random import Random

from tests.fuzz.mutate import damage, json_case
from tests.fuzz.oracle import SOUND, Case
from tests.fuzz.reference import STAGES, Reference, changed_results, metrics
from tests.fuzz.sandbox import Outcome

CHILDREN = {
    "pretrain": ("sft", "rm"),
    "sft": ("rm", "dpo", "ppo"),
    "rm": ("ppo", "evaluate"),
    "ppo": ("evaluate", "merge"),
    "dpo": ("evaluate",),
    "data": ("sft", "rm", "ppo", "dpo"),
}


def case(random: Random, place: Path, reference: Reference) -> Case:
    root = reference.copy(place / "out")
    folders = [folder for folder in sorted(root.iterdir()) if folder.is_dir()]
    folder = random.choice([*folders, *(f for f in folders if f.name != "data")])
    target = random.choice([f for f in sorted(folder.rglob("*.json*")) if f.parent.name not in ("adapter", "model")])
    sound = random.random() < SOUND
    name = "as it should be" if sound else f"{target.relative_to(root)}: {spoil(random, target)}"
    stage = folder.name
    readers = ["report"]
    if stage in CHILDREN:
        readers += ["child", "child"]
    if stage in STAGES and target.suffix == ".json":
        readers += ["again"]
    if stage in ("evaluate", "ppo", "rm"):
        readers += ["compare"]
    if stage in ("evaluate", "ab"):
        readers += ["ab", "ratings"]
    if stage in ("rm", "pretrain"):
        readers += ["score"]
    if stage in ("sft", "ppo", "pretrain"):
        readers += ["chat"]
    made = read(random.choice(readers), random, place, root, reference, stage, name)
    made.must = "accept" if sound else "either"
    return made


def spoil(random: Random, file: Path) -> str:
    """Damage a JSON or JSONL file in one place; returns what was done."""
    content = file.read_bytes()
    rows = content.splitlines(True)
    if random.random() < 0.2 or not rows:
        name, content = damage(random, content)
    elif file.suffix == ".jsonl":
        at = random.randrange(len(rows))
        name, text = json_case(random, json.loads(rows[at]))
        rows[at] = text.encode() + b"\n"
        name, content = f"line {at + 1}: {name}", b"".join(rows)
    else:
        name, text = json_case(random, json.loads(content))
        content = text.encode()
    file.write_bytes(content)
    return name


def read(reader: str, random: Random, place: Path, root: Path, reference: Reference, stage: str, name: str) -> Case:
    """A command that reads what was damaged in `stage`, and what its success would have to mean."""
    here = str(root.relative_to(place))
    if reader == "report":
        made = Case(f"report, {name}", ["report", here, "--to", "page.html"], place)
        made.valid = lambda outcome: harmless_page(place / "page.html")
    elif reader == "compare":
        arguments = ["compare", here, str(reference.root), "--json"]
        made = Case(f"compare, {name}", arguments if random.random() < 0.5 else arguments[:-1], place)
        made.valid = lambda outcome: strict_json(outcome) if "--json" in made.arguments else None
    elif reader == "ab":
        arguments = ["ab", *reference.options(), "--summary", "--json"]
        made = Case(f"ab, {name}", arguments if random.random() < 0.5 else arguments[:-1], place)
        made.valid = lambda outcome: strict_json(outcome) if "--json" in made.arguments else None
    elif reader == "ratings":
        made = Case(f"ratings export, {name}", ["ratings", "export", here, "--to", "rated.jsonl"], place)
    elif reader == "score":
        made = Case(f"score, {name}", ["score", *reference.options(), "--prompt", "Hello", "--response", "Hi."], place)
    elif reader == "chat":
        chosen = stage if stage != "pretrain" else "base"
        made = Case(f"chat, {name}", ["chat", *reference.options(), "--stage", chosen, "--tokens", "3"], place)
        made.stdin = b"Hello\n"
    else:
        again = stage if reader == "again" else random.choice(CHILDREN[stage])
        if reader == "child":
            _without(root, again)
        arguments = ["run", again, *reference.options()]
        made = Case(f"run {again}, {name}", arguments, place)
        if again != "evaluate" or reader == "child":  # figures of a finished evaluation are only shown again
            made.valid = lambda outcome: same_result(root / again, reference.root / again)
    return made


def _without(root: Path, stage: str) -> None:
    """Take away a stage and what was made after it, so that it runs."""
    import shutil

    after = {"rm": ("ppo",), "sft": ("rm", "ppo", "dpo")}.get(stage, ())
    for name in (stage, *after, "evaluate", "merge", "ab"):
        shutil.rmtree(root / name, ignore_errors=True)


def same_result(stage: Path, reference: Path) -> str | None:
    """Whether a stage left what the reference left; an evaluation leaves figures, the others weights."""
    if not (stage / "summary.json").is_file():
        return "there is no summary"
    if stage.name == "evaluate":
        same = _comparable(metrics(stage)) == _comparable(metrics(reference))
        return None if same else "the figures are not the reference's"
    changed = changed_results(stage, reference)
    return f"{', '.join(changed)} is not the reference's" if changed else None


def _comparable(figures: dict[str, float]) -> dict[str, float]:
    """Without those of DPO, which an evaluation has only where DPO was run before."""
    return {name: value for name, value in figures.items() if not name.startswith("dpo/")}


def strict_json(outcome: Outcome) -> str | None:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(outcome.out, parse_constant=refuse)
    except ValueError as error:
        return f"stdout is not strict JSON: {error}"
    return None


def harmless_page(page: Path) -> str | None:
    """Whether nothing of a run became markup in its report."""

    class Tags(HTMLParser):
        bad = ""

        def handle_starttag(self, tag, attrs):
            for name, value in attrs:
                if name.startswith("on") or (name == "src" and value == "x") or str(value).startswith("javascript:"):
                    self.bad = f"<{tag} {name}={value!r}>"

        def handle_data(self, data):
            if self.cdata_elem == "script" and data.strip() == "alert(1)":
                self.bad = "a script of the run's"

    if not page.is_file():
        return "there is no page"
    tags = Tags()
    tags.feed(page.read_text(encoding="utf-8"))
    return f"the page has {tags.bad}" if tags.bad else None
