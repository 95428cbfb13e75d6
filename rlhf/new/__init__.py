"""A recipe for a model and a card: what `rlhf new` writes."""
