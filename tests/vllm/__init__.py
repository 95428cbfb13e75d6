"""Tests of sampling with a real vLLM server, its CPU build, which `make test-vllm` installs."""
