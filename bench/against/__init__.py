"""`python -m bench.against`: what a change costs, beside another commit."""
