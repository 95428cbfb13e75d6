"""What may be wrong with data: flaws of rows, oddities of texts, leakage into held-out rows."""
