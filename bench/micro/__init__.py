"""Times of small functions, by pytest-benchmark."""
