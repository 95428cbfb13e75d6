"""Predicted peaks: what fits which card, what is pinned, and what real tensors took."""
