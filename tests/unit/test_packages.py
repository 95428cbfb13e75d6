"""Installed packages and optional parts."""

from rlhf.run import packages
from rlhf.run.packages import install_command


def test_an_optional_part_is_installed_by_its_packages_without_a_checkout(monkeypatch, tmp_path):
    assert install_command("judge") == "pip install '.[judge]'"
    monkeypatch.setattr(packages, "__file__", str(tmp_path / "rlhf" / "run" / "packages.py"))
    requires = ["torch==2.13.*", "openai<4,>=3; extra == 'judge'", 'vllm; extra == "other"']
    monkeypatch.setattr("rlhf.run.packages.importlib.metadata.requires", lambda name: requires)
    assert install_command("judge") == "pip install 'openai<4,>=3'"
