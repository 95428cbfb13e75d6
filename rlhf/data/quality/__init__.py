"""Quality checks of data: flaws of rows, oddities of texts, leakage into held-out rows."""
