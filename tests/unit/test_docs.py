"""Documents that would mislead are defects: commands must exist, links must lead somewhere, trees must be true."""

import ast
import importlib
import json
import math
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import yaml

import rlhf
from bench import docs_tables
from bench.gpu.command import command as bench_gpu
from bench.gpu.plan import ITEMS, choose, seconds
from bench.memory import budgets
from rlhf import cli, recipe
from rlhf.errors import UserError
from rlhf.recipe import plain_yaml, schema_model
from rlhf.recipe.names import SharedRole
from rlhf.recipe.schema import Merge
from rlhf.recipe.stages import STAGES
from rlhf.recipe.strict import Section
from tests.makefile import takes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [page for folder in ("archive", "recipes", "studies") for page in sorted((ROOT / folder).rglob("*.md"))]


def code_of(page: Path) -> list[str]:
    """Every command line that a page shows, in code blocks and between backticks."""
    text = page.read_text()
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.split("  #")[0].strip() for line in [*lines, *re.findall(r"`([^`\n]+)`", text)]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_commands_exist(page):
    for line in code_of(page):
        if not line.startswith("make "):
            continue
        words = [word for word in shlex.split(line)[1:] if not word.startswith("-")]
        targets = [word for word in words if "=" not in word]
        assert not targets or {*targets} <= takes().keys(), f"{line}: no such target"
        for name in (word.partition("=")[0] for word in words if "=" in word):
            assert any(name in takes()[target] for target in targets or ["ppo"]), f"{line}: {name} changes nothing"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_rlhf_commands_parse(page):
    for line in code_of(page):
        words = shlex.split(line) if line.startswith("rlhf ") else []
        command: click.Command = cli.cli
        while len(words) > 1 and isinstance(command, click.Group):
            words = words[1:]
            if words[0].startswith("-"):
                break
            assert words[0] in command.commands, f"{line}: no command {words[0]}"
            command = command.commands[words[0]]
        options = words if words and words[0].startswith("-") else words[1:]
        if options:
            command.make_parser(click.Context(command)).parse_args(options)


def settings() -> list[tuple[str, str, str]]:
    """HW, RECIPE and SET of every make command of a page that has a SET."""
    lines = [line for page in PAGES for line in code_of(page) if line.startswith("make ") and " SET=" in line]
    given = [dict(word.split("=", 1) for word in shlex.split(line) if "=" in word) for line in lines]
    return [(words.get("HW", "cpu"), words.get("RECIPE", ""), words["SET"]) for words in given]


@pytest.mark.parametrize(("hardware", "folder", "values"), settings())
def test_settings_that_a_page_shows_are_accepted(hardware, folder, values):
    directory = ROOT / folder if folder else recipe.resolve(hardware, ROOT / "recipes")
    assert recipe.load(directory, recipe.parse_overrides(values.split())).modified


def test_bench_gpu_commands_parse():
    commands = []
    for line in (line for page in PAGES for line in code_of(page)):
        if line.startswith("python -m bench.gpu"):
            commands.append(shlex.split(line)[3:])
        elif line.startswith("make bench-gpu"):
            given = [word.partition("=")[2] for word in shlex.split(line) if word.startswith("BENCH_ARGS=")]
            commands.append(shlex.split(" ".join(given)))
    assert len(commands) > 5
    for words in commands:
        options = bench_gpu.make_context("bench.gpu", words).params
        choose(options["only"])
        seconds(options["box"])


def test_the_page_on_the_first_gpu_hour_has_every_item():
    page = (ROOT / "docs/internals.md").read_text().partition("### What each item decides\n")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| ([\w-]+) \| ([0-9]+) \|", page, re.M)
    assert rows == [(item.name, f"{item.minutes:g}") for item in ITEMS]


def links(page: Path) -> Iterator[tuple[str, str]]:
    """File and anchor of every link and image of a page that stays in the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            file, _, anchor = target.partition("#")
            yield file, anchor


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for file, anchor in links(page):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


def test_the_index_lists_every_page_once():
    listed = [file for file, _ in links(ROOT / "docs/index.md") if file.endswith(".md") and "/" not in file]
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("name", ["rlhf", "peakmem", "bench", "studies"])
def test_every_module_has_a_docstring_for_the_page_of_the_code(name):
    assert f"<!-- modules of {name} -->" in (ROOT / "docs/code.md").read_text()
    assert not [file for file in (ROOT / name).rglob("*.py") if not ast.get_docstring(ast.parse(file.read_text()))]


def test_modules_that_the_page_about_memory_s_code_names_are_there():
    page = (ROOT / "docs/code.md").read_text()
    section = page.partition("## How memory is predicted\n")[2].partition("\n## ")[0]
    names = set(re.findall(r"`([\w/]+\.py)`", section))
    assert len(names) > 10
    whole = ("rlhf/", "peakmem/")
    assert not [name for name in names if not (ROOT / ("" if name.startswith(whole) else "rlhf/plan") / name).exists()]


def test_the_predicted_peaks_beside_the_speed_are_those_that_are_pinned():
    page = (ROOT / "docs/speed.md").read_text()
    (whole,) = (row for row in _rows(page) if row[0].startswith("h100-mistral-7b v2") and row[1] == "library")
    assert whole[2:] == pinned_peaks("h100-mistral-7b v2", "sft", "rm", "ppo", "dpo")
    (ppo,) = pinned_peaks("4090-llama2-7b v2", "ppo")
    assert f"both trunks have the same peaks; PPO's is {ppo} GB." in page


def test_the_time_of_the_first_run_is_that_of_the_record():
    (record,) = (ROOT / "results/cpu-tiny/v2/cpu").glob("*.json")
    seeds = json.loads(record.read_text())["seeds"].values()
    minutes = [sum(stages[name]["wall_seconds"] for name in ("pretrain", "sft", "rm", "ppo")) / 60 for stages in seeds]
    assert "on a toy model: about 3 to 5 minutes on one CPU core" in (ROOT / "README.md").read_text()
    assert len(minutes) == 5 and min(minutes) > 3 and max(minutes) < 5


def test_the_readme_begins_with_two_commands_and_then_the_guides_figures():
    page = (ROOT / "README.md").read_text()
    first = re.findall(r"```\n(.*?)```", page, re.S)[0].splitlines()
    assert [line.partition("  #")[0].strip() for line in first] == ["make ppo HW=cpu", "make plan HW=4090"]
    assert "| recipe | stage | published, GB" in next(line for line in page.splitlines() if line.startswith("|"))
    assert len(re.sub(r"(?m)^\|.*\n", "", page).split()) <= 1000
    assert "-index-url" not in page, "an index may be out of reach: a hint of another page, not a step"


def test_the_predicted_peaks_beside_the_advice_are_those_that_are_pinned():
    page = (ROOT / "docs/choosing.md").read_text()
    shown = {name: peaks for name, *peaks in _rows(page) if re.search(r" v\d$", name)}
    assert len(shown) >= 2
    assert shown == {name: pinned_peaks(name, "rm", "ppo", "dpo") for name in shown}
    phases = budgets.pinned(ROOT / "recipes/4090-llama2-7b/v2")["ppo"]
    rows = {row[0]: row[1] for row in _rows(page) if len(row) == 3}
    for name, phase in (("rollout", "rollout"), ("evaluation", "evaluate"), ("update", "update")):
        most = max(sum(parts.values()) for key, parts in phases.items() if key.partition("/")[0] == phase)
        assert rows[name] == f"{most / 1e9:.1f}"


def pinned_peaks(name: str, *stages: str) -> list[str]:
    """The cells of a recipe in the table of pinned peaks, for some of its columns."""
    header, _, *body = _rows(budgets.peaks_table(ROOT / "recipes"))
    (row,) = (dict(zip(header, cells, strict=True)) for cells in body if cells[0] == name)
    return [row[stage] for stage in stages]


def _rows(page: str) -> list[list[str]]:
    """Cells of every line of a table."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]


CHANGES = re.compile(r"^## Changes from (v\d+)\n(.*?)(?=^## |\Z)", re.M | re.S)
CARDS = [page for page in PAGES if page.name == "README.md" and CHANGES.search(page.read_text())]


def named_keys(cell: str) -> set[str]:
    """The dotted keys of a cell: `ppo.adapter`, or for several sections `sft`, `rm`: `adapter`."""
    sections, _, keys = cell.rpartition(": ")
    names = re.findall(r"`([\w.]+)`", keys)
    return {f"{section}.{name}" for section in re.findall(r"`(\w+)`", sections) for name in names} or set(names)


def plain_values(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a recipe by their dotted keys."""
    plain: dict[str, Any] = {}
    for key, value in values.items():
        plain |= plain_values(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return plain


def test_keys_of_a_table_of_changes_are_read():
    assert named_keys("`ppo.adapter`, `ppo.steps`") == {"ppo.adapter", "ppo.steps"}
    assert named_keys("`sft`, `rm`: `adapter`, `margin`") == {"sft.adapter", "sft.margin", "rm.adapter", "rm.margin"}


@pytest.mark.parametrize("card", CARDS, ids=lambda card: str(card.parent.relative_to(ROOT)))
def test_a_table_of_changes_names_every_key_that_differs(card):
    section = CHANGES.search(card.read_text())
    assert section
    named = {key for row in _rows(section[2])[2:] for key in named_keys(row[0])}
    before, after = (
        plain_values(recipe.load(folder).recipe.model_dump(mode="json"))
        for folder in (card.parent.parent / section[1], card.parent)
    )
    differing = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert named == differing - {"status", "default", "description"}


SETTINGS = ROOT / "recipes/4090-llama2-7b/v2/README.md"


def settings_of_both() -> list[list[str]]:
    """Key, value, origin and reason of every setting that both versions of 4090-llama2-7b have."""
    section = SETTINGS.read_text().partition("### What both versions have\n")[2].partition("\n### ")[0]
    return [[row[0].strip("`"), *row[1:]] for row in _rows(section) if row[0].startswith("`")]


def test_the_settings_for_24_gb_are_those_of_the_recipes():
    v1, v2 = (
        plain_values(recipe.load(ROOT / "recipes/4090-llama2-7b" / version).recipe.model_dump(mode="json"))
        for version in ("v1", "v2")
    )
    same = settings_of_both()
    assert len(same) > 20
    assert all(v1[key] == v2[key] for key, *_ in same)


def test_the_settings_that_the_guide_gives_are_marked_in_its_recipe():
    section = ""
    marks: dict[str, dict[str, bool]] = {}  # section, key: marked or not
    for line in (ROOT / "recipes/4090-llama2-7b/v1/recipe.yaml").read_text().splitlines():
        section = line.partition(":")[0] if re.match(r"\w+:", line) else section
        if key := re.match(r"  (\w+): ", line):
            marks.setdefault(section, {})[key[1]] = "# guide" in line
    block = marks.pop("training")
    marks |= {stage: block | marks[stage] for stage in ("sft", "rm", "ppo")}  # the guide has no DPO
    given = {f"{section}.{key}" for section, keys in marks.items() for key, marked in keys.items() if marked}
    assert all((row[2] == "guide") == (row[0] in given) for row in settings_of_both())
    changes = CHANGES.search(SETTINGS.read_text())
    assert changes
    assert not given & {key for row in _rows(changes[2])[2:] for key in named_keys(row[0])}


def test_the_predicted_peaks_beside_the_settings_are_those_that_are_pinned():
    page = _rows(SETTINGS.read_text())
    shown = [row for row in page if row[0].startswith("4090-")]
    assert len(shown) == 4
    for name, _, *peaks in shown:
        assert peaks == pinned_peaks(" ".join(name.split()[:2]), "sft", "rm", "ppo", "dpo", "evaluate")


def test_some_recipes_have_a_table_of_changes():
    assert len(CARDS) >= 2


def test_every_logged_key_of_ppo_is_explained():
    page = (ROOT / "docs/metrics.md").read_text()
    source = (ROOT / "rlhf/stages/ppo.py").read_text()
    keys = set(re.findall(r'"((?:objective|policy|val|loss|response)/\w+)"', source))
    assert len(keys) > 12
    assert not {key for key in keys if f"`{key}`" not in page}


def summaries_of_the_records() -> list[Any]:
    """The summary of every stage of every seed in results/."""
    records = [json.loads(file.read_text()) for file in (ROOT / "results").rglob("*.json")]
    return [summary for record in records for stages in record.get("seeds", {}).values() for summary in stages.values()]


def test_every_key_of_the_summaries_in_the_records_is_explained():
    summaries = summaries_of_the_records()
    explained = set(re.findall(r"`[^`]+`", (ROOT / "docs/metrics.md").read_text()))
    metrics = {
        re.sub(r"^(base|sft|ppo|grpo|dpo|rm|second_rm)/", "", key)
        for summary in summaries
        for key in summary["metrics"]
    }
    assert len(metrics) > 60
    for key in {*metrics, *(key for summary in summaries for key in summary)}:
        over_sft = re.sub(r"_base(?=_|$)", "_sft", key)  # the page says that `_base` stands for it without SFT
        of_any_reward = re.sub(r"^reward_\w+?(?=(_sft|_gain)?(_low|_high)?$)", "reward_NAME", over_sft)
        names = (key, over_sft, of_any_reward, f"eval/{of_any_reward}")  # in summaries without `eval/`
        assert {f"`{name}`" for name in names} & explained, key


def test_the_names_of_our_targets_lead_to_their_metrics():
    section = (ROOT / "docs/metrics.md").read_text().split("## Names of targets")[1].split("\n## ")[0]
    named = {(re.sub(r" \(.*", "", name), metric.strip("`")) for name, metric, *_ in _rows(section)[2:]}
    released = [recipe.load(folder) for folder in recipe.available(ROOT / "recipes")]
    targets = [target for loaded in released if loaded.recipe.status == "released" for target in loaded.figures]
    assert {(target.name, target.metric) for target in targets} == named


@pytest.mark.parametrize("page", docs_tables.pages(), ids=lambda page: page.name)
def test_tables_are_as_make_docs_tables_writes_them(page):
    text = page.read_text()
    assert docs_tables.written(text) == text, "run `make docs-tables`"


def test_every_section_of_a_recipe_has_tables():
    page = (ROOT / "docs/recipes.md").read_text()
    shown = {name for names in re.findall(r"^<!-- keys (.+) -->", page, re.M) for name in names.split()}
    assert shown == {"recipe", *sections_of(recipe.Recipe)}


def sections_of(kind: type[Section], prefix: str = "") -> set[str]:
    """The dotted names of all sections that a recipe may have."""
    found = set()
    for key, field in kind.model_fields.items():
        for section in docs_tables.sections(field.annotation):
            found |= {prefix + key} | sections_of(section, f"{prefix}{key}.")
    return found


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ("| `r` | rank |", "lora_alpha of lora has no row"),
        ("| `r` | rank |\n| `r` | rank |", "r of lora has two rows"),
        ("| `rank` | rank |", "r of lora has no row"),
    ],
)
def test_a_key_without_its_row_is_named(rows, fault):
    with pytest.raises(UserError, match=fault):
        docs_tables.written(f"<!-- keys lora -->\n{rows}\n<!-- /keys lora -->\n")


def test_a_new_row_of_name_and_meaning_is_completed():
    rows = "\n".join(f"| `{key}` | old \\| \\| meaning |" for key in Merge.model_fields)
    written = docs_tables.written(f"<!-- keys merge -->\n{rows}\n<!-- /keys merge -->\n")
    assert "| `base` | `full`, `dequantized` | full | old \\| \\| meaning |" in written
    assert docs_tables.written(written) == written


def test_every_number_of_a_recipe_is_bounded():
    whole = recipe.Recipe.model_json_schema()
    for section in (whole, *whole["$defs"].values()):
        for key, field in section.get("properties", {}).items():
            for kind in field.get("anyOf", [field]):
                if kind.get("type") in ("integer", "number"):
                    assert min(kind.get("maximum", math.inf), kind.get("exclusiveMaximum", math.inf)) <= 1e30, key


def test_the_bounds_of_files_are_documented():
    page = (ROOT / "docs/recipes.md").read_text().partition("## Bounds")[2]
    for name in ("MAX_BYTES", "MAX_NODES", "MAX_DEPTH"):
        value = getattr(plain_yaml, name)
        amount = rf"{value >> 10} KiB" if name == "MAX_BYTES" else rf"\b{value:,}\s(values|levels)"
        assert re.search(amount, page)
    assert f"`vocab_size` {schema_model.SMALLEST_TRAINED} or more" in page


def test_the_keys_people_change_most_exist():
    page = (ROOT / "docs/recipes.md").read_text().partition("## Keys people change most\n")[2].partition("\n## ")[0]
    rows = _rows(page)[2:]
    keys = [key for row in rows for key in re.findall(r"`([^`]+)`", row[0])]
    assert len(rows) == 10 and all("." in key and _exists(key) for key in keys)


def test_every_check_is_explained():
    from rlhf.observe.watch import CHECKS

    page = (ROOT / "docs/troubleshooting.md").read_text()
    symptoms = set(re.findall(r"`(\w+)`", page.partition("\n## ")[0]))
    assert {check.name for check in CHECKS} <= symptoms, "each is found by its symptom"
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == [check.name for check in CHECKS]


def test_the_tests_that_are_named_as_evidence_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/reliability.md").read_text()))
    there = {
        name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(named) > 12
    assert named <= there


def glossary() -> list[list[str]]:
    """Term, meaning and code of every row of docs/glossary.md."""
    rows = _rows((ROOT / "docs/glossary.md").read_text())
    return [row for row in rows if row[0] != "term" and set(row[0]) != {"-"}]


def terms_of(row: list[str]) -> list[str]:
    """The terms that a row defines, without their symbol: `trunk, backbone`, `policy (π)`."""
    return [term.strip().lower() for term in re.sub(r" \(.*\)", "", row[0]).split(",")]


def test_every_term_of_the_glossary_is_defined_once():
    rows = glossary()
    assert len(rows) > 55
    assert all(len(row) == 3 and all(row) for row in rows)
    terms = [term for row in rows for term in terms_of(row)]
    assert len(set(terms)) == len(terms), [term for term in terms if terms.count(term) > 1]


def _exists(name: str) -> bool:
    """Whether a name of the glossary is a symbol of the package, a key of a recipe or a metric that is explained."""
    first, _, rest = name.partition(".")
    if first in ("rlhf", "peakmem"):
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            try:
                found: Any = importlib.import_module(".".join(parts[:end]))
            except ModuleNotFoundError:
                continue
            for part in parts[end:]:
                found = getattr(found, part, None)
            return found is not None
    if rest:
        return rest in getattr(recipe, first.capitalize()).model_fields
    return f"`{name}`" in (ROOT / "docs/metrics.md").read_text()


def test_what_the_glossary_names_in_the_code_exists():
    names = {name for row in glossary() for name in re.findall(r"`([^`]+)`", row[2])}
    assert len(names) > 50
    assert not [name for name in names if not _exists(name)]


def test_the_words_of_this_project_are_in_the_glossary():
    """Terms that a reader of the code meets and that other projects use in another sense, or not at all."""
    terms = {term for row in glossary() for term in terms_of(row)}
    own = {
        "trunk",
        "lean trunk",
        "lower layers",
        "rehearsal",
        "stand-in",
        "dialogue tokenizer",
        "micro-batch",
        "minibatch",
    }
    assert own | {"shared base", "role", "phase", "shard", "toy world", "shaped score", "critic warm-up"} <= terms


def test_the_stages_and_roles_of_the_glossary_are_those_of_the_code():
    meanings = {row[0]: row[1] for row in glossary()}
    assert meanings["stage"].partition(": ")[2].split(", ") == list(STAGES)
    assert set(re.findall(r"\w+", meanings["role"])) >= set(get_args(SharedRole))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_function_that_a_link_names_is_in_the_file(page):
    named = re.findall(r"\[`(\w+)`\]\(([^)#]+\.py)\)", page.read_text())
    for name, file in named:
        source = (page.parent / file).read_text()
        assert re.search(rf"^ *(def|class) {name}\b", source, re.M), f"{file} has no {name}"
    assert len(named) > 8 or page.name != "equations.md"


def test_names_that_do_not_exist_are_noticed():
    assert not any(map(_exists, ("rlhf.objectives.gae.gea", "rlhf.nothing", "ppo.kl_koef", "objective/nothing")))


def test_the_forge_runs_what_the_repository_runs():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert {".ci/run", "make docs"} <= set(re.findall(r"- run: (.+)", workflow))
    jobs = yaml.safe_load(workflow)["jobs"]
    assert jobs["docs"]["env"]["EXTRAS"] == "docs dev"
    assert jobs["docs"]["steps"][-1]["run"] == ".venv/bin/python -m pytest tests/e2e/test_docs_site.py"
    assert jobs["wheel"]["steps"][-1]["run"].endswith("rlhf plan --hw cpu")
    assert re.findall(r"^make (\w+)$", (ROOT / ".ci/run").read_text(), re.M) == ["setup", "lint", "test"]


@pytest.mark.parametrize(("length", "code"), [(1, 0), (72, 0), (73, 1)])
def test_a_hook_refuses_long_subjects(length, code, tmp_path):
    config = plain_yaml.read_yaml(ROOT / ".pre-commit-config.yaml")
    (hook,) = [hook for hook in config["repos"][0]["hooks"] if hook.get("stages") == ["commit-msg"]]
    assert config["default_stages"] == ["pre-commit"]
    message = tmp_path / "COMMIT EDITMSG"
    message.write_text("s" * length + "\n\n" + "body " * 40 + "\n")
    done = subprocess.run([*shlex.split(hook["entry"]), message], capture_output=True, text=True)
    assert done.returncode == code
    assert ("the subject has 73 characters" in done.stdout) == bool(code)


@pytest.mark.parametrize(("length", "code"), [(72, 0), (73, 1)])
def test_a_pull_request_with_a_long_subject_is_refused(length, code, tmp_path):
    """Of its own commits: one of the branch that it is for may be longer, and so may a merge."""
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["subjects"]["steps"]
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@example.org"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # as a hook has it
    subprocess.run([*git, "init", "--quiet"], env=environment, check=True)
    for subject in ("b" * 80, "é" * length, "short"):
        commit = [*git, "commit", "--quiet", "--allow-empty", "--message", subject]
        subprocess.run(commit, env=environment, check=True)
    environment |= {"BASE": "HEAD~2", "HEAD": "HEAD"}
    done = subprocess.run(["bash", "-e", "-c", steps[-1]["run"]], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == code


@pytest.mark.parametrize(
    ("files", "body", "code"),
    [
        (["rlhf/a.py"], "", 1),
        (["docs/a.md"], "", 0),
        (["rlhf/a.py", "CHANGELOG.md"], "", 0),
        (["rlhf/a.py"], "No changelog: a name that nobody sees.", 0),
    ],
)
def test_a_pull_request_that_changes_the_package_without_a_line_in_the_changelog_is_refused(
    files, body, code, tmp_path
):
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["changelog"]["steps"]
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@example.org"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run([*git, "init", "--quiet"], env=environment, check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "base"], env=environment, check=True)
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("new")
    subprocess.run([*git, "add", "."], env=environment, check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", f"change\n\n{body}"], env=environment, check=True)
    environment |= {"BASE": "HEAD~1", "HEAD": "HEAD"}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", steps[-1]["run"]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == code


@pytest.mark.parametrize("name", ["ci", "release"])
def test_the_forge_s_jobs_keep_no_token_in_the_checkout(name):
    jobs = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())["jobs"]
    checkouts = [step for job in jobs.values() for step in job["steps"] if "checkout" in step.get("uses", "")]
    assert checkouts and all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_a_release_has_its_part_of_the_changelog_as_notes(tmp_path):
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert ".ci/run" in [step.get("run") for step in jobs["check"]["steps"]] and jobs["wheel"]["needs"] == "check"
    assert jobs["publish"]["needs"] == ["wheel", "image"]
    assert "--notes-file notes.md" in jobs["publish"]["steps"][-1]["run"]
    runs = [step["run"] for step in jobs["wheel"]["steps"] if "run" in step]
    (notes,) = (run for run in runs if "CHANGELOG.md" in run)
    unreleased = (ROOT / "CHANGELOG.md").read_text()
    ours = re.sub(rf"(?m)^(## {re.escape(rlhf.__version__)}) \(.*\)$", r"\1 (2026-12-01)", unreleased)
    older = "\n## 0.1.0 (2026-01-01)\n\nOlder.\n"
    (tmp_path / "CHANGELOG.md").write_text(ours.replace("\n## ", "\n## Unreleased\n- New.\n\n## ", 1) + older)
    environment = os.environ | {"GITHUB_REF_NAME": f"v{rlhf.__version__}"}
    subprocess.run(["bash", "-e", "-c", notes], cwd=tmp_path, env=environment, check=True)
    expected = ours.partition(f"\n## {rlhf.__version__} (")[2].partition("\n")[2].partition("\n## ")[0]
    assert (tmp_path / "notes.md").read_text().strip() == expected.strip() != ""
    (tmp_path / "CHANGELOG.md").write_text(ours.replace("(2026-12-01)", "(unreleased)"))
    assert subprocess.run(["bash", "-e", "-c", notes], cwd=tmp_path, env=environment).returncode == 1
    environment["GITHUB_REF_NAME"] = "v9.9"
    assert subprocess.run(["bash", "-e", "-c", notes], cwd=tmp_path, env=environment).returncode == 1


def test_of_a_release_s_jobs_the_one_that_publishes_may_write_and_runs_no_code_of_the_repository():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    allowed = {name: job["permissions"] for name, job in workflow["jobs"].items()}
    assert workflow["permissions"] == {}
    assert allowed.pop("publish") == {"contents": "write"}
    assert allowed.keys() == {"check", "wheel", "image"} and all(v == {"contents": "read"} for v in allowed.values())
    assert not [step for step in workflow["jobs"]["publish"]["steps"] if "checkout" in step.get("uses", "")]


@pytest.mark.parametrize("form", ["bug", "measurement", "question"])
def test_forms_for_issues_name_every_field(form):
    fields = plain_yaml.read_yaml(ROOT / f".github/ISSUE_TEMPLATE/{form}.yml")
    assert fields.keys() >= {"name", "description", "body"}
    inputs = [field for field in fields["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in inputs}) == len(inputs) > 2
    assert all(field["attributes"]["label"] for field in inputs)


def test_the_citation_has_the_version_of_the_package():
    citation = plain_yaml.read_yaml(ROOT / "CITATION.cff")
    assert citation["version"] == rlhf.__version__
    assert f"## {rlhf.__version__} (" in (ROOT / "CHANGELOG.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["authors"] == citation["authors"]
