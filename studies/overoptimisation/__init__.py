"""How proxy and truth part when a policy is optimised against a reward model, in a world whose truth is known."""
