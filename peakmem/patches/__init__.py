"""What other libraries do otherwise on `meta` than on a card: a module for each, with all of its private symbols."""
