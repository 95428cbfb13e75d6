"""From files, a hub data set or generated data to token ids: formats, load, split, tokenize, batch."""
