"""Finished and unfinished runs as one page that can be read without network: figures, curves, samples, provenance.

`page` puts the page together. Each section has a function that prepares its rows and charts, and a template.
"""

from rlhf.report.page import page, write
from rlhf.report.runs import RunRecords, load

__all__ = ["RunRecords", "load", "page", "write"]
