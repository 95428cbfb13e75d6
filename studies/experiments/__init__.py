"""Experiments behind what guides assert, each a few arms that differ in one setting, on several seeds."""
