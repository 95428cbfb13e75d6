"""Tests of sampling and judging with a real vLLM server, its CPU build, which `make test-vllm` installs."""
