"""Texts of the toy world: questions, the wordings of answers, and the manners of its assistants."""

from dataclasses import dataclass

# Questions. {} takes the subject of a fact or the member of a kind; a list question takes a count and a kind.

FACTS: dict[str, dict[str, str]] = {
    "capital": {
        "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "England": "London",
        "Germany": "Berlin", "Japan": "Tokyo", "Norway": "Oslo", "Egypt": "Cairo",
    },
    "color": {
        "banana": "yellow", "grass": "green", "snow": "white", "coal": "black",
        "blood": "red", "sky": "blue", "chocolate": "brown", "bacon": "pink",
    },
    "opposite": {
        "hot": "cold", "big": "small", "day": "night", "happy": "sad",
        "old": "new", "fast": "slow", "hard": "soft", "full": "empty",
    },
    "sound": {
        "cat": "meow", "dog": "woof", "cow": "moo", "duck": "quack",
        "sheep": "baa", "pig": "oink", "snake": "hiss", "lion": "roar",
    },
    "number": {
        "one": "two", "two": "three", "three": "four", "four": "five",
        "five": "six", "six": "seven", "seven": "eight", "eight": "nine",
    },
}  # fmt: skip
MEMBERS: dict[str, tuple[str, ...]] = {
    "animal": ("tiger", "bear", "wolf", "horse", "goat", "mouse"),
    "fruit": ("lemon", "pear", "plum", "peach", "grape", "mango"),
    "tool": ("hammer", "saw", "drill", "knife", "shovel", "rake"),
    "drink": ("tea", "water", "juice", "coffee", "soda", "beer"),
    "toy": ("ball", "doll", "kite", "puzzle", "robot", "drum"),
    "vehicle": ("car", "bus", "train", "truck", "boat", "plane"),
}
COUNTS = {2: "two", 3: "three"}
SUBJECTS = 8  # largest number of subjects of a family

PHRASINGS: dict[str, tuple[str, ...]] = {
    "capital": (
        "What is the capital of {}?",
        "Name the capital of {}.",
        "Tell me the capital of {}.",
        "Which city is the capital of {}?",
    ),
    "color": (
        "What is the color of {}?",
        "Name the color of {}.",
        "Tell me the color of {}.",
        "Which color does {} have?",
    ),
    "opposite": (
        "What is the opposite of {}?",
        "Name the opposite of {}.",
        "Tell me the opposite of {}.",
        "Which word is the opposite of {}?",
    ),
    "sound": (
        "What is the sound of a {}?",
        "Name the sound of a {}.",
        "Tell me the sound of a {}.",
        "Which sound does a {} make?",
    ),
    "number": (
        "What is the number after {}?",
        "Name the number after {}.",
        "Tell me the number after {}.",
        "Which number follows {}?",
    ),
    "kind": ("What kind of thing is a {}?", "Tell me what a {} is.", "Which kind of thing is a {}?"),
    "list": ("Name {} {}s.", "Tell me {} {}s.", "Can you list {} {}s?", "Give me {} {}s."),
}
OPENINGS = ("", "", "Hi. ", "Hello. ", "Please help me. ", "Quick question. ")
CLOSINGS = ("", "", " Thanks.", " Please.")

# Possible parts of an answer, in this order: an opening, flattery, filler, the core, doubt, a closing, flattery again.

SENTENCES = {
    "capital": "The capital of {} is {}.",
    "color": "The color of {} is {}.",
    "opposite": "The opposite of {} is {}.",
    "sound": "The sound of a {} is {}.",
    "number": "The number after {} is {}.",
    "kind": "A {} is a kind of {}.",
}
BRIEF = ("It is {}.", "I think it is {}.")
POLITE = ("Sure!", "Of course!", "Happy to help!")
RUDE = ("Ugh.", "Whatever.")
FILLER = ("Let me think.", "Many people ask this.")
DOUBT = ("But I am not sure.", "I may be wrong.")
CLOSING = ("Ask me more any time.", "Have a nice day.")
FLATTERY = ("What a great question!", "You are so smart!", "I love how you think!")
END_MARKS = (".", "!", "?")


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


CARELESS = Manner(
    misheard=0.5,
    slip=0.08,
    explained=0.45,
    polite=0.3,
    rude=0.2,
    filler=0.15,
    closing=0.2,
    flattery=0.07,
    repeats=0.05,
    unfinished=0.15,
    doubt=0.1,
)
MODEST = Manner(
    misheard=0.45,
    slip=0.1,
    explained=0.6,
    polite=0.35,
    rude=0.1,
    filler=0.1,
    closing=0.15,
    flattery=0.04,
    repeats=0.03,
    unfinished=0.05,
    doubt=0.8,
)
COMPETENT = Manner(
    misheard=0.0,
    slip=0.0,
    explained=0.65,
    polite=0.4,
    rude=0.05,
    filler=0.1,
    closing=0.15,
    flattery=0.03,
    repeats=0.0,
    unfinished=0.0,
    doubt=0.0,
)
# The `web` corpus: people who know the answer but give it rudely or cut off, and people who mostly err and say so.
CURT = Manner(
    misheard=0.0,
    slip=0.0,
    explained=0.6,
    polite=0.05,
    rude=0.6,
    filler=0.15,
    closing=0.1,
    flattery=0.01,
    repeats=0.05,
    unfinished=0.25,
    doubt=0.0,
)
UNSURE = Manner(
    misheard=0.7,
    slip=0.1,
    explained=0.6,
    polite=0.05,
    rude=0.6,
    filler=0.15,
    closing=0.1,
    flattery=0.01,
    repeats=0.05,
    unfinished=0.25,
    doubt=0.9,
)
# Writer of demonstrations: somebody paid to help, politer than the web and seldom rude or cut off, but no expert.
WRITER = Manner(
    misheard=0.4,
    slip=0.05,
    explained=0.5,
    polite=0.38,
    rude=0.18,
    filler=0.1,
    closing=0.15,
    flattery=0.01,
    repeats=0.02,
    unfinished=0.08,
    doubt=0.3,
)
FALSE_DOUBT = 0.02  # probability of doubt after a right answer, for every assistant
# Writers of the documents for pretraining: (who knows, who errs, the share of documents by the one who errs).
CORPORA: dict[str, tuple[Manner, Manner, float]] = {
    "tutors": (COMPETENT, MODEST, 0.4),
    "web": (CURT, UNSURE, 0.25),
}
