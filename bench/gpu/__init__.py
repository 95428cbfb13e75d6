"""Measurements that need a GPU, most valuable first, within a time limit: `python -m bench.gpu`.

__main__.py  the list of items, and the command that runs each in a process of its own
items.py     what each item measures
packages.py  which packages are missing, and how to bring them; needs nothing but Python
"""
