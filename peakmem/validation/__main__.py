"""`python -m peakmem.validation`: write README.md beside this file."""

from peakmem.validation.table import FOLDER, page

if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page(), encoding="utf-8")
