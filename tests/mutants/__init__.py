"""Faults that a test must find."""
