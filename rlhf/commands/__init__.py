"""The work behind fetch, new, rehearse, reproduce, compare, chat, score and serve; rlhf/cli prints the results."""
