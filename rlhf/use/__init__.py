"""Commands that use finished runs: chat, score, serve, fetch, reproduce."""
