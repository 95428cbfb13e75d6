"""Texts of the toy world, which lie in toy.yaml: questions, the wordings of answers, the manners of its assistants."""

from dataclasses import dataclass
from pathlib import Path

from rlhf.recipe.plain_yaml import read_yaml

FILE = Path(__file__).with_name("toy.yaml")
_TEXTS = read_yaml(FILE)

FACTS: dict[str, dict[str, str]] = _TEXTS["facts"]
MEMBERS: dict[str, tuple[str, ...]] = {kind: tuple(members) for kind, members in _TEXTS["members"].items()}
COUNTS: dict[int, str] = {count: word for word, count in _TEXTS["counts"].items()}
SUBJECTS = 8  # largest number of subjects of a family

PHRASINGS: dict[str, list[str]] = _TEXTS["phrasings"]
OPENINGS: list[str] = _TEXTS["openings"]
CLOSINGS: list[str] = _TEXTS["closings"]

SENTENCES: dict[str, str] = _TEXTS["sentences"]
BRIEF: list[str] = _TEXTS["brief"]
POLITE = tuple[str, ...](_TEXTS["polite"])
RUDE: list[str] = _TEXTS["rude"]
FILLER: list[str] = _TEXTS["filler"]
DOUBT: list[str] = _TEXTS["doubt"]
CLOSING: list[str] = _TEXTS["closing"]
FLATTERY: list[str] = _TEXTS["flattery"]
END_MARKS = tuple[str, ...](_TEXTS["end_marks"])


@dataclass(frozen=True, slots=True)
class Manner:
    """Manner of an assistant's answers; each number is a probability, `doubt` the one after a wrong answer."""

    misheard: float  # answers a question of another family
    slip: float  # names one wrong thing of the right family
    explained: float  # says "The capital of France is Paris.", not "It is Paris."
    polite: float
    rude: float
    filler: float
    closing: float
    flattery: float  # at each of two places
    repeats: float
    unfinished: float
    doubt: float


MANNERS = {name: Manner(**numbers) for name, numbers in _TEXTS["manners"].items()}
CARELESS, WRITER = MANNERS["careless"], MANNERS["writer"]
FALSE_DOUBT = 0.02  # probability of doubt after a right answer, for every assistant
# Writers of the documents for pretraining: (who knows, who errs, the share of documents by the one who errs).
CORPORA: dict[str, tuple[Manner, Manner, float]] = {
    name: (MANNERS[corpus["knows"]], MANNERS[corpus["errs"]], corpus["erring_share"])
    for name, corpus in _TEXTS["corpora"].items()
}
