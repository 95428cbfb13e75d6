"""Predicted memory held against GPUs that other people measured."""
