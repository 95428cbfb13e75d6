"""Generated data: the toy world, sums, and stand-in dialogues of given lengths."""
