"""Output for people: the consoles, progress with the time left, tables, and numbers in words."""
