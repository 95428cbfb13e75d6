"""Sampling of rollouts: by the engine in this process, or by a vLLM server."""
