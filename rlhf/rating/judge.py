"""A model behind an OpenAI-compatible endpoint as one more rater of the pairs that people rate with `rlhf ab`.

It judges each pair twice, in both orders. A choice counts only if both orders agree.
"""

import re
from typing import get_args

from rlhf.evaluation import judging
from rlhf.evaluation.judging import Endpoint, Refused
from rlhf.process.threads import results_of
from rlhf.rating import ratings
from rlhf.rating.pairs import AnswerOrder, Pair, PairedAnswers
from rlhf.terminal import excerpt, say
from rlhf.terminal.progress import Bar

AT_ONCE = 4  # pairs that are being judged
# What a letter chooses, by the order of the answers.
CHOICES: dict[AnswerOrder, dict[str, str]] = {
    "ab": {"A": "a", "B": "b", "C": "tie"},
    "ba": {"A": "b", "B": "a", "C": "tie"},
}
# A line that is a letter, also as `**Answer: A**`; or that begins with one and a mark, as `A: it is right`.
LETTER = re.compile(r"^\W*(?:(?:answer|verdict|choice)\W*)?([ABC])(?:[^\w:]*$|[.:,)\]] )", re.I | re.M)
TASK = """\
Two assistants answered the last message of a conversation. Which answer is better? Judge what it says: is it to the \
point, correct, helpful and harmless. Length, formatting and the order of the answers are no reasons."""
REPLY_WITH = """\
Reply with one letter and nothing else: A if answer A is better, B if answer B is better, C if they are equally good."""


def _question(pair: Pair, order: AnswerOrder) -> str:
    """Return the question about a pair, its answers in this order."""
    first, second = pair.in_order(order)
    material = {"conversation": pair.prompt, "answer A": first, "answer B": second}
    return judging.question(TASK, material, pair.digest, REPLY_WITH)


def letter(reply: str) -> str | None:
    """Return the choice of a reply after its reasoning, A, B or C; None if it names none or several."""
    found = {name.upper() for name in LETTER.findall(judging.conclusion(reply) or "")}
    return found.pop() if len(found) == 1 else None


def run(paired: PairedAnswers, url: str, model: str) -> None:
    """Judge the pairs that the model has not judged; each rating is stored as soon as it is known.

    Pairs that the endpoint refuses are left to be judged. Raises UserError for any other fault of the endpoint.
    """
    rater = f"{ratings.JUDGE}{model}"
    endpoint = Endpoint(url, model, _question(Pair(0, "0" * 16, "What is 2 + 2?", "4", "5", {}), "ab"))
    known = {(row.item, row.sha256) for row in ratings.current_ratings(paired.file) if row.rater == rater}
    todo = [pair for pair in paired.pairs if (pair.item, pair.digest) not in known]

    def rate(pair: Pair) -> list[str]:
        """Judge a pair and store the rating; return the replies without a clear choice."""
        replies = {order: endpoint.reply(_question(pair, order)).text for order in get_args(AnswerOrder)}
        said = {order: CHOICES[order].get(letter(reply) or "") for order, reply in replies.items()}
        first, second = said.values()
        choice = "skip" if first is None or second is None else first if first == second else "tie"
        ratings.rate(paired.file, pair, rater, choice, "ab", said=said)
        return [reply for order, reply in replies.items() if said[order] is None]

    refused: list[str] = []
    unclear: list[str] = []
    with Bar("judge", len(todo)) as bar:
        for number, result in enumerate(results_of(rate, todo, AT_ONCE), 1):
            if isinstance(result, Refused):
                refused.append(str(result))
            elif isinstance(result, Exception):
                raise result
            else:
                unclear += result
            bar.update(number)
    if refused:
        say(f"judge: {len(refused)} of {len(todo)} pairs are not judged: {refused[0]}")
    if unclear:
        say(f"judge: {len(unclear)} replies without a clear choice, the first: {excerpt(unclear[0]) or 'an empty one'}")
