"""What commands do that are neither stages nor plans: fetch, new, reproduce, compare, chat, score and serve."""
