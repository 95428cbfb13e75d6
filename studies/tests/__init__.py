"""Tests of the studies: `make test-studies`."""
