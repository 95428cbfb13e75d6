"""Sampling: the engine in this process, and a vLLM server in its place."""
