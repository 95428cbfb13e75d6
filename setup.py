"""What pyproject.toml cannot say: a wheel holds `recipes/` as `rlhf/recipes/`, so that it is complete by itself."""

from pathlib import Path
from shutil import copytree

from setuptools import setup
from setuptools.command.build_py import build_py


class WithRecipes(build_py):
    """Copies the recipes into the package that is built; an editable install reads them where they are."""

    def run(self):
        super().run()
        if not self.editable_mode:
            copytree("recipes", Path(self.build_lib, "rlhf", "recipes"), dirs_exist_ok=True)


setup(cmdclass={"build_py": WithRecipes})
