"""A synthetic preference world whose true reward is known.

People ask an assistant small questions: a capital, a color, an opposite, a sound, the next number, the kind of a thing,
a short list. The assistant often mishears them and answers another question, and it may be polite or rude, brief,
flattering or cut off. Everything that decides the worth of an answer is read back from the text alone:

    components(prompt, response)         what the answer shows: the share that is correct, politeness, flattery, ...
    true_reward(prompt, response)        their sum, weighted by TRUTH: what a model trained on preferences should raise
    annotator_utility(prompt, response)  the true reward plus the annotator's WEAKNESS for flattery and for length

Of two answers the annotator prefers the first with probability σ((u₁ − u₂) / τ), u the utility (Bradley-Terry). The
temperature τ (`annotator_tau`) is set so that u itself names the preferred answer in a known share of the pairs, 0.74
by default: the Bayes accuracy, which no reward model can beat. Because u is not the truth, a policy that climbs a good
copy of u far enough flatters and rambles: the true reward falls while the learned one still rises.

Assistants write the texts, each in a manner of its own (`toy_texts.py`). A careless one answers every pair. Pretraining
documents come from one who knows and from one who errs; with `corpus: tutors` the second mostly says so afterwards ("I
may be wrong."). To predict what follows, a language model must notice whether an answer fits its question, which later
helps the reward model. Demonstrations are by a writer of their own.

`write` makes these files of JSON lines, dialogues in HH style ("\\n\\nHuman: ...\\n\\nAssistant: ..."):

    corpus.jsonl  {"text"}                documents for pretraining
    pairs.jsonl   {"chosen", "rejected"}  two transcripts that differ in the last answer only
    demonstrations.jsonl  {"instruction", "output"}  for SFT, where the recipe wants them

All hold training and held-out dialogues. All questions of a dialogue lie on one side of the split that
`rlhf.data.split` makes by the first human message, so no held-out question appears in training, not even in a later
turn. The question as worded and framed is held out; the facts behind it occur on both sides.
"""

import functools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlhf.data.split import Part, part
from rlhf.data.worlds import write_files
from rlhf.data.worlds.toy_texts import (
    BRIEF,
    CARELESS,
    CLOSING,
    CLOSINGS,
    CORPORA,
    COUNTS,
    DOUBT,
    END_MARKS,
    FACTS,
    FALSE_DOUBT,
    FILLER,
    FLATTERY,
    MEMBERS,
    OPENINGS,
    PHRASINGS,
    POLITE,
    RUDE,
    SENTENCES,
    SUBJECTS,
    WRITER,
    Manner,
)
from rlhf.files import JsonObject

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"

# Worth of an answer per unit of each component (see `components`). The best answer earns 1.5 + 0.8 + 0.7 = 3.

TRUTH = {
    "correct": 1.5,
    "wrong": -0.3,
    "polite": 0.8,
    "rude": -0.8,
    "explained": 0.7,
    "repeats": -0.5,
    "unfinished": -0.8,
    "doubt": -0.2,
    "flattery": -0.4,
    "long": -0.1,
    "new_turn": -1.5,
}
WEAKNESS = {"flattery": 0.75, "words": 0.015}


EARLIER_EXCHANGE = 0.06  # share of dialogues with one exchange before the last question


@dataclass(frozen=True, slots=True)
class Question:
    """A question that asks for `wanted` of the right `answers`; a good answer also names the `subject`."""

    family: str
    text: str
    subject: str
    answers: tuple[str, ...]
    wanted: int = 1


NAMES = frozenset(
    [
        *(answer for facts in FACTS.values() for answer in facts.values()),
        *MEMBERS,
        *(w for ws in MEMBERS.values() for w in ws),
    ]
)  # every word that can be an answer

_WORD = re.compile(r"[A-Za-z]+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@functools.cache
def questions() -> dict[str, Question]:
    """Return all questions by their text, without what people say before and after."""
    every: list[Question] = []
    for family, facts in FACTS.items():
        for subject, answer in facts.items():
            every += [Question(family, form.format(subject), subject, (answer,)) for form in PHRASINGS[family]]
    for kind, members in MEMBERS.items():
        for member in members:
            every += [Question("kind", form.format(member), member, (kind,)) for form in PHRASINGS["kind"]]
        for count, word in COUNTS.items():
            every += [
                Question("list", form.format(word, kind), f"{kind}s", members, count) for form in PHRASINGS["list"]
            ]
    return {question.text: question for question in every}


@functools.cache
def _families(subjects: int = SUBJECTS) -> tuple[tuple[Question, ...], ...]:
    """Return the questions of each family.

    Lists, whose wordings are the rarest, stand twice and so are drawn twice as often. The questions ask about the
    first `subjects` subjects of each family and members of each kind.
    """
    names = {name for facts in FACTS.values() for name in list(facts)[:subjects]}
    names |= {name for members in MEMBERS.values() for name in members[:subjects]} | {f"{kind}s" for kind in MEMBERS}
    selected = [question for question in questions().values() if question.subject in names]
    return tuple(tuple(q for q in selected if q.family == f) for f in (*FACTS, "kind", "list", "list"))


def parse(prompt: str) -> Question:
    """Return the last human question of a transcript that ends before the assistant's answer, or with "Assistant:".

    Raises ValueError when it is no question of this world.
    """
    message = prompt.rstrip().removesuffix(ASSISTANT.strip()).rsplit(HUMAN, 1)[-1].strip()
    text = message
    for words in sorted(OPENINGS, key=len, reverse=True):
        if words and text.startswith(words):
            text = text[len(words) :]
            break
    for words in sorted(CLOSINGS, key=len, reverse=True):
        if words and text.endswith(words):
            text = text[: -len(words)]
            break
    try:
        return questions()[text]
    except KeyError:
        raise ValueError(f"not a question of the toy world: {message!r}") from None


def components(prompt: str, response: str) -> dict[str, float]:
    """Measure an answer to the last question of `prompt`.

    Returns one number for each component that TRUTH or WEAKNESS may weigh:

    correct     right things named, as a share of those wanted, at most 1
    wrong       other things named, right ones beyond those wanted included, at most 2
    polite      1 if it opens with a courtesy          rude      1 if it holds a rude word
    explained   1 if it names the subject              doubt     1 if it doubts itself
    repeats     repeated things and sentences, at most 3
    flattery    flattering sentences, at most 4        unfinished  1 if no full stop or the like ends it
    long        words beyond 14, at most 20            words     words, at most 40
    new_turn    1 if it goes on to speak for the next turn
    """
    question = parse(prompt)
    text = response.strip()
    words = _WORD.findall(text)
    things = [word for word in words if word in NAMES and word != question.subject]
    right = len(set(things) & set(question.answers))
    sentences = [sentence for sentence in _SENTENCE_END.split(text) if sentence]
    repeats = len(things) - len(set(things)) + len(sentences) - len(set(sentences))
    size = len(text.split())
    values = {
        "correct": min(right, question.wanted) / question.wanted,
        "wrong": min(len(set(things)) - min(right, question.wanted), 2),
        "polite": text.startswith(POLITE),
        "rude": any(phrase in text for phrase in RUDE),
        "explained": question.subject in words,
        "repeats": min(repeats, 3),
        "unfinished": not text.endswith(END_MARKS),
        "doubt": any(phrase in text for phrase in DOUBT),
        "flattery": min(sum(text.count(phrase) for phrase in FLATTERY), 4),
        "long": min(max(size - 14, 0), 20),
        "words": min(size, 40),
        "new_turn": HUMAN.strip() in text or ASSISTANT.strip() in text,
    }
    return {name: float(value) for name, value in values.items()}


def _weigh(weights: dict[str, float], values: dict[str, float]) -> float:
    return math.fsum(weight * values[name] for name, weight in weights.items())


def true_reward(prompt: str, response: str) -> float:
    """Return the true worth of the answer: its components weighted by TRUTH. At most 3."""
    return _weigh(TRUTH, components(prompt, response))


def annotator_utility(prompt: str, response: str) -> float:
    """Return the worth of the answer to the annotator: the true reward plus WEAKNESS."""
    values = components(prompt, response)
    return _weigh(TRUTH, values) + _weigh(WEAKNESS, values)


def answer(rng: random.Random, question: Question, manner: Manner, subjects: int = SUBJECTS) -> str:
    """Draw one answer in the given manner.

    A misheard question is replaced by one about the first `subjects` of another family.
    """
    fate = rng.random()
    wrong = fate < manner.misheard + manner.slip
    if fate < manner.misheard:
        question = rng.choice(rng.choice([qs for qs in _families(subjects) if qs[0].family != question.family]))
    things = rng.sample(question.answers, question.wanted)
    if manner.misheard <= fate < manner.misheard + manner.slip:
        things[rng.randrange(len(things))] = rng.choice(_alternatives(question))
    if rng.random() < manner.repeats:
        repeated = rng.randrange(len(things))
        things.insert(repeated, things[repeated])
    listed = " and ".join(filter(None, (", ".join(things[:-1]), things[-1])))
    if rng.random() >= manner.explained:
        core = rng.choice(BRIEF).format(listed)
    elif question.family == "list":
        core = f"{COUNTS[question.wanted].capitalize()} {question.subject} are {listed}."
    else:
        core = SENTENCES[question.family].format(question.subject, listed)

    tone = rng.random()
    parts: list[str] = []
    if tone < manner.polite + manner.rude:
        parts.append(rng.choice(POLITE if tone < manner.polite else RUDE))
    for phrases, probability in ((FLATTERY, manner.flattery), (FILLER, manner.filler)):
        if rng.random() < probability:
            parts.append(rng.choice(phrases))
    parts.append(core)
    doubt = manner.doubt if wrong else FALSE_DOUBT
    for phrases, probability in ((DOUBT, doubt), (CLOSING, manner.closing), (FLATTERY, manner.flattery)):
        if rng.random() < probability:
            parts.append(rng.choice(phrases))
    words = " ".join(parts).split(" ")
    if rng.random() < manner.unfinished and len(words) > 2:
        return " ".join(words[: -rng.choice((1, 1, 2))]).rstrip(".!?,")
    return " ".join(words)


def _alternatives(question: Question) -> list[str]:
    """Return wrong answers of the same family."""
    if question.family == "list":
        pool = [member for members in MEMBERS.values() for member in members]
    else:
        pool = list(MEMBERS) if question.family == "kind" else list(FACTS[question.family].values())
    return [word for word in pool if word not in question.answers]


Side = Callable[[str], Part]  # the part of the data to which a human message belongs


def _message(rng: random.Random, subjects: int) -> tuple[str, Question]:
    question = rng.choice(rng.choice(_families(subjects)))
    return rng.choice(OPENINGS) + question.text + rng.choice(CLOSINGS), question


def _prompt(rng: random.Random, manner: Manner, side: Side, subjects: int = SUBJECTS) -> tuple[str, Question]:
    """Draw a transcript up to "Assistant:" and return it with its last question.

    An earlier exchange is on the same side of the split.
    """
    message, question = _message(rng, subjects)
    past = ""
    if rng.random() < EARLIER_EXCHANGE:
        past = f"{HUMAN} {message}{ASSISTANT} {answer(rng, question, manner, subjects)}"
        first = side(message)
        message, question = _message(rng, subjects)
        while side(message) != first:
            message, question = _message(rng, subjects)
    return f"{past}{HUMAN} {message}{ASSISTANT}", question


def draw_document(rng: random.Random, side: Side, corpus: str = "tutors", subjects: int = SUBJECTS) -> str:
    """Draw a transcript for pretraining, by one of the two assistants of a corpus."""
    knows, errs, erring_share = CORPORA[corpus]
    manner = errs if rng.random() < erring_share else knows
    prompt, question = _prompt(rng, manner, side, subjects)
    return f"{prompt} {answer(rng, question, manner, subjects)}"


def draw_demonstration(rng: random.Random, subjects: int = SUBJECTS) -> tuple[str, str]:
    """Draw a question as a person asks it, and an answer by the writer of demonstrations."""
    message, question = _message(rng, subjects)
    return message, answer(rng, question, WRITER, subjects)


def draw_answers(rng: random.Random, side: Side, subjects: int = SUBJECTS) -> tuple[str, str, str]:
    """Draw a prompt and two different answers of the careless assistant."""
    prompt, question = _prompt(rng, CARELESS, side, subjects)
    first = second = answer(rng, question, CARELESS, subjects)
    while second == first:
        second = answer(rng, question, CARELESS, subjects)
    return prompt, first, second


def prefers_first(prompt: str, first: str, second: str, tau: float) -> float:
    """Return the probability that the annotator prefers the first answer: σ((u₁ − u₂) / τ)."""
    difference = annotator_utility(prompt, first) - annotator_utility(prompt, second)
    return 1 / (1 + math.exp(-difference / tau))


@functools.cache
def annotator_tau(bayes_accuracy: float = 0.74) -> float:
    """Return the annotator's τ at which the better answer by utility is preferred in this share of the pairs.

    Bisection finds τ by the mean of σ(|u₁ − u₂| / τ) over 10,000 pairs that depend on nothing else. Ties of utility
    may make shares above 0.95 impossible.
    """
    rng = random.Random("toy:temperature")
    drawn = [draw_answers(rng, lambda _: "train") for _ in range(10_000)]
    gaps = [abs(annotator_utility(p, first) - annotator_utility(p, second)) for p, first, second in drawn]
    low, high = 1e-2, 1e2
    for _ in range(60):
        tau = math.sqrt(low * high)
        if math.fsum(1 / (1 + math.exp(-gap / tau)) for gap in gaps) / len(gaps) > bayes_accuracy:
            low = tau
        else:
            high = tau
    return low


def bayes_accuracy(pairs: Iterable[tuple[str, str, str]], tau: float) -> tuple[float, float]:
    """Return how often the annotator's own utility names the chosen answer: realised and expected share.

    pairs: (prompt, chosen, rejected). A tie counts one half. The expected share is the mean of σ(|u₁ − u₂| / τ), which
    does not depend on the drawn labels.
    """
    chances = [prefers_first(prompt, chosen, rejected, tau) for prompt, chosen, rejected in pairs]
    realised = math.fsum((p > 0.5) + 0.5 * (p == 0.5) for p in chances) / len(chances)
    return realised, math.fsum(max(p, 1 - p) for p in chances) / len(chances)


def expected_gap(pairs: Iterable[tuple[str, str, str]], margins: Iterable[float], tau: float) -> float:
    """Return how far a judge's accuracy is below the best possible one, in points, expected over the labels.

    pairs: (prompt, one answer, the other); margins: the judge's score of the first less that of the second. Each pair
    adds the probability that a fresh label agrees with the utility, less the probability that it agrees with the judge,
    which is ½ for a tie.
    """
    gaps = []
    for (prompt, first, second), margin in zip(pairs, margins, strict=True):
        p = prefers_first(prompt, first, second, tau)
        agrees = 0.5 if margin == 0 else p if margin > 0 else 1 - p
        gaps.append(max(p, 1 - p) - agrees)
    return 100 * math.fsum(gaps) / len(gaps)


def write(
    directory: Path,
    *,
    seed: int,
    documents: int,
    pairs: int,
    heldout_fraction: float,
    validation_fraction: float = 0.0,
    bayes_accuracy: float = 0.74,
    corpus: str = "tutors",
    demonstrations: int = 0,
    subjects: int = SUBJECTS,
) -> list[Path]:
    """Write the files into `directory` and return them.

    No file depends on the number of rows of another, and a longer file starts with the shorter one.
    """
    tau = annotator_tau(bayes_accuracy)

    def side(message: str) -> Part:
        return part(message, seed, heldout_fraction, validation_fraction)

    def corpus_rows() -> Iterator[JsonObject]:
        rng = random.Random(f"toy:corpus:{seed}")
        for _ in range(documents):
            yield {"text": draw_document(rng, side, corpus, subjects)}

    def pair_rows() -> Iterator[JsonObject]:
        rng = random.Random(f"toy:pairs:{seed}")
        for _ in range(pairs):
            prompt, first, second = draw_answers(rng, side, subjects)
            if rng.random() >= prefers_first(prompt, first, second, tau):
                first, second = second, first
            yield {"chosen": f"{prompt} {first}", "rejected": f"{prompt} {second}"}

    def demonstration_rows() -> Iterator[JsonObject]:
        rng = random.Random(f"toy:demonstrations:{seed}")
        for _ in range(demonstrations):
            message, response = draw_demonstration(rng, subjects)
            yield {"instruction": message, "output": response}

    contents = {"corpus.jsonl": corpus_rows(), "pairs.jsonl": pair_rows()}
    if demonstrations:
        contents["demonstrations.jsonl"] = demonstration_rows()
    return write_files(directory, contents)
