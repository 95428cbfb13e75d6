"""What commands do that are neither stages nor plans: fetch, new, reproduce, chat, score and serve."""
