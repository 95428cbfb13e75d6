"""Measurements that need a GPU, most valuable first, within an hour: `python -m bench.gpu`.

plan.py      the items in their order, each with its minutes and the claim that it decides
__main__.py  names missing packages, or starts the command
command.py   the command: checks the machine, runs the items within the time, and what else its options ask for
tables.py    what it prints
runner.py    one item in a separate process group, ended when its time is up
item.py      the program of that process: runs the item's function and writes its record as it goes
record.py    what a record holds, where it goes below results/, and how a contributed one is checked
measured.py  what each item measures, with units
packages.py  which packages are missing, and how to bring them; needs nothing but Python

The items themselves: machine.py (device), suites.py (tests/gpu), decoding.py and training.py with the table of
variants.py, memory.py, speed.py.
docs/internals.md is the guide for people.
"""
