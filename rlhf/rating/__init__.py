"""Blind ratings of two policies' answers: by people on a local page, or by a model; and what the ratings say."""
