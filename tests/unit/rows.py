"""Preference pairs made by hand, for tests of what is counted in them, and names of numbers beside answers."""

from rlhf.data.rows import Message, PreferencePair

# One word in each of them is that of a rating, or says how good something is; none says which answers are better
UNCLEAR = (
    *("bias_rating", "hallucination_score", "toxicityScore", "spam rating", "cost", "violation-score", "reward.regret"),
    *("distance_reward", "verbosity", "likes", "grade", "refusal_scores", "reversed_rank", "inverse_rating", "elo"),
    *("score_against", "negative_reward", "worst_rank", "misinformation_score", "votes_against", "quality", "stars"),
    *("win_loss", "non_preference", "place", "order", "position", "overall", "Fehlerscore_rating", "ratings_withdrawn"),
    *("difficulty_score", "risk.score", "annotations.toxicity.Rating", "score_of_harm", "rank_correlation"),
)


def pair_of_one_turn(prompt: str, chosen: str, rejected: str, n: int = 0) -> PreferencePair:
    """A question with two answers, in line `n` of a file."""
    return PreferencePair((Message("user", prompt),), chosen, rejected, f"a.jsonl:{n}")
