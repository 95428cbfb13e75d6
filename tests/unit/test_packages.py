"""Installed packages and optional parts."""

import sys

import pytest
from click.testing import CliRunner

from rlhf import report as reporting
from rlhf.cli.report import report
from rlhf.errors import UserError
from rlhf.run import packages
from rlhf.run.packages import install_command


def test_an_optional_part_is_installed_by_its_packages_without_a_checkout(monkeypatch, tmp_path):
    assert install_command("report") == "pip install '.[report]'"
    monkeypatch.setattr(packages, "__file__", str(tmp_path / "rlhf" / "run" / "packages.py"))
    requires = ["torch==2.13.*", "plotly<8,>=7.1; extra == 'report'", 'vllm; extra == "other"']
    monkeypatch.setattr("rlhf.run.packages.importlib.metadata.requires", lambda name: requires)
    assert install_command("report") == "pip install 'plotly<8,>=7.1'"


def test_a_report_asks_for_its_package_before_it_reads_anything(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr(reporting, "write", lambda *_: pytest.fail("read"))
    (tmp_path / "sft").mkdir()
    result = CliRunner().invoke(report, [str(tmp_path)])
    assert isinstance(result.exception, UserError) and "a report needs plotly: pip install" in str(result.exception)
