"""From files, a hub data set or the toy world to token ids: formats, quality, split, load, tokenize."""
