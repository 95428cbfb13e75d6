"""Data: reading of files, hub sets and generated rows, splitting, tokenizing and batching."""
