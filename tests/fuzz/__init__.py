"""Malformed inputs and kills, generated from a seed: `make fuzz`. docs/reliability.md has figures and promises."""
