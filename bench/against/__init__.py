"""`make bench-against`: what a change costs, measured beside another commit on the same machine."""
