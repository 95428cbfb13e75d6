"""What a run learned, in a sentence; what the reward means and its range; a few answers before and after."""

from collections.abc import Sequence
from typing import NamedTuple

from rlhf.data.worlds import toy
from rlhf.rating.pairs import SPEAKERS, turns
from rlhf.recipe.stages import EVALUATE, RM, SFT, STARTS
from rlhf.report.records import TITLES, RunRecords
from rlhf.run.evidence import IS_BETTER, IS_WORSE, START_IN_WORDS, Gain, gains_over_start, of_prompts, way_to_know
from rlhf.run.records import Answer, SampleLine
from rlhf.terminal.wording import estimate, number

SHOWN = 3  # prompts above the curve
MORE = 20  # further prompts, folded
# What a number says that judges an answer, by the name of its reward without options.
MEANING = {
    "score": "what the run's own reward model gives; more is better, without a unit",
    "exact_answer": "1 for the right answer, else 0",
    "numeric_answer": "1 for the right number, else 0",
    "math_answer": "1 for the right expression, else 0",
    "reasoning_gym": "0 to 1, by the task's own check",
    "regex": "1 where the answer matches, else 0",
    "length": "0 up to the limit of length, −1 from twice the limit on",
    "judge": "a judge's mark, from 0 to 1",
    "reward_model": "what another reward model gives; more is better",
}


class Sentence(NamedTuple):
    """What a policy learned; `kind` is good, bad, or "" where neither is known."""

    text: str
    kind: str


def sentences(run: RunRecords) -> list[Sentence]:
    """Return what each policy learned; without one the reward model or SFT, or what has finished."""
    if gains := gains_over_start(run.summaries):
        return [Sentence(_of_gain(gain), gain.kind) for gain in gains]
    if RM in run.summaries and (accuracy := estimate(run.summaries[RM].metrics, "accuracy")):
        return [Sentence(f"The reward model prefers the chosen answer in a share of {accuracy} of held-out pairs.", "")]
    if SFT in run.summaries and (loss := run.summaries[SFT].metrics.get("eval_loss")) is not None:
        return [Sentence(f"SFT ended at a held-out loss of {number(loss)} nats per token.", "")]
    finished = ", ".join(TITLES[stage] for stage in run.summaries)
    return [Sentence(f"Finished: {finished}." if finished else "Nothing has finished yet.", "")]


def _of_gain(gain: Gain) -> str:
    """Return what a policy learned as a sentence: the metric before and after, with its interval and prompts."""
    policy, start = TITLES[gain.stage], START_IN_WORDS[gain.origin]
    ends = "" if gain.end_interval is None else " (95 %: {:.3g} to {:.3g})".format(*sorted(gain.end_interval))
    course = f"from {gain.start:.3g} ({start}) to {gain.end:.3g}{ends}{of_prompts(gain.prompts)}{gain.caveats()}"
    verb = {IS_BETTER: "raised", IS_WORSE: "lowered"}.get(gain.verdict)
    if verb:
        return f"{policy} {verb} the {gain.name} {course}."
    way = way_to_know(gain.value, gain.interval, gain.prompts)
    return f"It is not known whether {policy} changed the {gain.name}: {course}; {way}."


def meanings(run: RunRecords) -> list[str]:
    """Return what each reward of the sentences means, and the range of it in the answers that are kept."""
    texts = {}
    functions = run.manifests[EVALUATE].reward_functions if EVALUATE in run.manifests else {}
    for gain in gains_over_start(run.summaries):
        function = functions.get(gain.key.removeprefix("reward_"), "")
        kind = function.partition("(")[0] or gain.key
        if gain.key == "true_reward":
            most = sum(weight for weight in toy.TRUTH.values() if weight > 0)
            meaning = f"what the toy world counts: {_weights(1)}, less for {_weights(-1)}; at most {most:g}"
        else:
            meaning = MEANING.get(kind, f"what the function {kind} gives")
        given = [v for line in run.samples for a in line.answers.values() if (v := _value(a, gain.key)) is not None]
        seen = f" In these answers it runs from {min(given):.3g} to {max(given):.3g}." if given else ""
        texts[gain.key] = f"The {gain.name} is {meaning}.{seen}"
    return [*texts.values()]


def _weights(sign: int) -> str:
    """Return the components of the true reward with this sign, in words."""
    names = {name: name.replace("_", " ") for name, weight in toy.TRUTH.items() if weight * sign > 0}
    return ", ".join(f"{toy.TRUTH[name]:g} if {words}" if sign > 0 else words for name, words in names.items())


def _value(answer: Answer, key: str) -> float | None:
    """Return what an answer was given by the metric `key` of the evaluation."""
    return answer.given.get(key.removeprefix("reward_"))


class Said(NamedTuple):
    """An answer: whose, its text, what it was given, and good or bad where it is better or worse than the start's."""

    policy: str
    text: str
    given: str
    kind: str

    @classmethod
    def of(cls, answer: Answer, policy: str, kind: str = "") -> "Said":
        """Return an answer as it is shown."""
        given = " · ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in answer.given.items())
        return cls(policy, answer.response, given, kind)


class SampleRow(NamedTuple):
    """A held-out prompt: its last question, the turns before it, the answers, and the right one if it is known."""

    question: str
    before: Sequence[tuple[str, str]]
    answers: list[Said]
    expected: str


class Samples(NamedTuple):
    """Prompts, the rule by which the first ones were chosen, and further ones in the order of the record."""

    rule: str
    shown: list[SampleRow]
    more: list[SampleRow]


def samples(run: RunRecords) -> Samples:
    """Return held-out prompts with every policy's answer.

    The first are those with the least, the middle and the largest gain of the first policy's main metric over its
    start; without one the first of the record.
    """
    gain = next(iter(gains_over_start(run.summaries)), None)
    key = gain.key if gain else ""
    changes = {}
    for index, line in enumerate(run.samples if gain else ()):
        start, end = (line.answers.get(name) for name in (gain.origin, gain.stage)) if gain else (None, None)
        before, after = (None if answer is None else _value(answer, key) for answer in (start, end))
        if before is not None and after is not None:
            changes[index] = after - before
    order = sorted(changes, key=lambda index: changes[index])
    if len(order) >= SHOWN and gain:
        chosen = [order[-1], order[len(order) // 2], order[0]]
        rule = f"the largest, the middle and the least change in {gain.name} of {len(order)} answers"
    else:
        chosen, rule = [*range(min(SHOWN, len(run.samples)))], "the first of the record"
    rest = [index for index in range(len(run.samples)) if index not in chosen][:MORE]
    shown, more = ([row_of(run.samples[index], key) for index in indices] for indices in (chosen, rest))
    return Samples(rule, shown, more)


def row_of(line: SampleLine, key: str) -> SampleRow:
    """Return a line of samples as it is shown; `key` is the metric that colours answers."""
    dialogue = turns(line.prompt, line.messages)
    last = max((i for i, (who, _) in enumerate(dialogue) if who == SPEAKERS["user"]), default=len(dialogue) - 1)
    start = next((line.answers[name] for name in STARTS if name in line.answers), None)
    of_start = None if start is None else _value(start, key)
    answers = []
    for policy, answer in line.answers.items():
        value = _value(answer, key)
        change = 0.0 if policy in STARTS or value is None or of_start is None else value - of_start
        kind = "good" if change > 0 else "bad" if change < 0 else ""
        answers.append(Said.of(answer, TITLES.get(policy, policy), kind))
    return SampleRow(dialogue[last][1], [*dialogue[:last], *dialogue[last + 1 :]], answers, line.expected or "")
