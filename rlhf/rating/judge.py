"""A model behind an OpenAI-compatible endpoint as one more rater of the pairs that people rate with `rlhf ab`.

It judges each pair twice, in both orders. A choice counts only if both orders agree.
"""

import re
from typing import get_args

from rlhf.evaluation import judging
from rlhf.evaluation.endpoint import Refused, quoted
from rlhf.process.threads import results_of
from rlhf.rating import store
from rlhf.rating.pairs import AnswerOrder, Pair, PairedAnswers
from rlhf.terminal import say
from rlhf.terminal.progress import Bar

# What a letter chooses, by the order of the answers.
CHOICES: dict[AnswerOrder, dict[str, store.Choice]] = {
    "ab": {"A": "a", "B": "b", "C": "tie"},
    "ba": {"A": "b", "B": "a", "C": "tie"},
}
REPLY_CHARACTERS = 200  # characters of a reply that are stored, from its beginning and its end
# A line of words that names a choice. Any other word beside the letter, such as "worse" or "not", may deny it.
BEFORE = (
    "answer|assistant|option|response|one|verdict|choice|winner|conclusion|is|the|my|in|final|better|best|correct|"
    "preferred|chosen|selected|i|d|would|say|think|prefer|choose|pick|go|with|so|thus|therefore|overall|boxed"
)
AFTER = "(?: is (?:the )?(?:better|best|winner|correct)(?: answer| one)?)?(?: (?:because|since) .*)?"
CHOICE_LINE = re.compile(f"((?:it (?:is|s) )?(?:(?:{BEFORE}) )*)([abc]|(?:a )?tie){AFTER}", re.I)
TASK = """\
Two assistants answered the last message of a conversation. Which answer is better? Judge what it says: is it to the \
point, correct, helpful and harmless. Length, formatting and the order of the answers are no reasons."""
REPLY_WITH = """\
Reply with one letter and nothing else: A if answer A is better, B if answer B is better, C if they are equally good."""


class Judge:
    """A model that compares the answers of a pair."""

    def __init__(self, url: str, model: str):
        """Ask an easy question first. Raises UserError if the address, the key or the model is wrong."""
        easy = Pair(0, "0" * 16, "What is 2 + 2?", "4", "5", {})
        self.model = model
        self._endpoint = judging.client(url, model, _question(easy, "ab"))

    @property
    def rater(self) -> str:
        """Return the name under which its ratings are kept."""
        return f"{store.JUDGE}{self.model}"

    def reply(self, pair: Pair, order: AnswerOrder) -> str:
        """Return the model's reply about a pair in this order. Raises the errors of Endpoint.ask."""
        return self._endpoint.ask(_question(pair, order))


def _question(pair: Pair, order: AnswerOrder) -> str:
    """Return the question about a pair, its answers in this order."""
    first, second = pair.in_order(order)
    material = {"conversation": pair.prompt, "answer A": first, "answer B": second}
    return judging.question(TASK, material, pair.digest, REPLY_WITH)


def letter(reply: str) -> str | None:
    """Return the choice of a reply, A, B or C, or None if it names none or several.

    A letter counts where the reply begins with it and punctuation follows, as in `A: it says more` or `A - it says
    more`, alone on a line, and in a line such as `the better answer is A` or `answer A is better`. Other letters are
    part of the reasons: `answer B is too long`, `the worse answer is B`.
    """
    if (text := judging.conclusion(reply)) is None:
        return None
    # "A: B", "A, B and C are options", "A - B" and "A-level" name no choice.
    begin = r"^(?:_|[^\w\n])*([ABC])(?:[.:;)\]*](?!\s*[ABC][\W_]*$)|(?:,| ?[-–—](?!\w))(?!\s*(?-i:[ABC])\b))"
    begun = {name.upper() for name in re.findall(begin, text, re.I | re.M)}
    letters = begun if re.match(begin, text, re.I) and len(begun) == 1 else set()  # a list of A and B is no choice
    for line in text.splitlines():
        match = CHOICE_LINE.fullmatch(" ".join(re.findall(r"[^\W_]+", line)))
        goes_on = match and match[1] and (match[2] == "a" or line.rstrip(" *").endswith(":"))  # `Answer A:`; an article
        if match and not goes_on:
            letters.add("C" if match[2].lower().endswith("tie") else match[2].upper())
    return letters.pop() if len(letters) == 1 else None


def judge_pair(judge: Judge, pair: Pair) -> store.RatingLine:
    """Return the rating of a pair, with the judge's choice and the reply in each order."""
    orders: tuple[AnswerOrder, ...] = get_args(AnswerOrder)
    replies = {order: judge.reply(pair, order) for order in orders}
    choices = {order: CHOICES[order].get(letter(reply) or "") for order, reply in replies.items()}
    first, second = choices.values()
    choice: store.Choice = "skip" if first is None or second is None else first if first == second else "tie"
    excerpts = {order: _excerpt(reply) for order, reply in replies.items()}
    return store.new_line(pair, judge.rater, choice, "ab", said=choices, replies=excerpts)


def _excerpt(reply: str) -> str:
    """Return a reply without its middle: a choice stands at the beginning, or after the reasons."""
    gap = " […] "
    half = (REPLY_CHARACTERS - len(gap)) // 2
    return reply if len(reply) <= REPLY_CHARACTERS else f"{reply[:half]}{gap}{reply[-half:]}"


def run(judge: Judge, paired: PairedAnswers, *, limit: int | None = None, at_once: int = 4) -> None:
    """Judge those of the first `limit` pairs that this model has not judged yet, `at_once` at a time.

    Each rating is written as soon as it is known. The number of pairs that the endpoint refuses is printed at the end;
    the next run asks about them again.
    """
    judged_pairs = {rating.pair for rating in store.current_ratings(paired.file) if rating.rater == judge.rater}
    todo = [pair for pair in paired.pairs[:limit] if (pair.item, pair.digest) not in judged_pairs]

    def rate(pair: Pair) -> store.RatingLine:
        line = judge_pair(judge, pair)
        store.append(paired.file, line)
        return line

    refused: list[str] = []
    unparsed: list[str] = []  # replies without a clear choice
    with Bar("judge", len(todo)) as bar:
        for number, result in enumerate(results_of(rate, todo, at_once), 1):
            if isinstance(result, Refused):
                refused.append(str(result))
            elif isinstance(result, Exception):
                raise result
            else:
                unparsed += [reply for order, reply in result["replies"].items() if result["said"][order] is None]
            bar.update(number, "refused" if isinstance(result, Exception) else result["choice"])
    if refused:
        say(f"judge: {len(refused)} of {len(todo)} pairs are not judged: {refused[0]}")
    if unparsed:
        reply = quoted(unparsed[0]) or "an empty one"
        say(f"judge: {len(unparsed)} replies without a clear choice, the first: {reply}")
