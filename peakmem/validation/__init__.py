"""Predictions beside what other people measured on their own cards; `python -m peakmem.validation` makes the table."""
