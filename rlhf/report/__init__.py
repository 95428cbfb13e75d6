"""A report: one page about finished and unfinished runs, readable without network.

It shows figures, curves, samples and provenance. `page` assembles it. Each section has a function that prepares its
rows and charts, and a template.
"""

from rlhf.report.answers import write_answers
from rlhf.report.page import data_files, page, write
from rlhf.report.runs import RunRecords, load

__all__ = ["RunRecords", "data_files", "load", "page", "write", "write_answers"]
