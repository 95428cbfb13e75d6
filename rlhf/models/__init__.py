"""Base models and adapters: loading, checks, the four roles of PPO on one frozen base, cheaper decoding."""
