"""The work behind the commands fetch, new, reproduce, compare, chat, score and serve; rlhf/cli prints the results."""
