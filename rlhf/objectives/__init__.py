"""The mathematics of RLHF as pure functions: tensors in, tensors out.

Each module is imported by name: masked, logprobs, kl, rewards, importance, losses, groups, choices. Half-precision
inputs are computed and returned in float32; float64 stays float64 (weights of tokens are float32). In functions that
take a mask it is a bool tensor, True on real tokens, and the content of a padded slot (1e9, inf, NaN) changes neither a
result nor a gradient.
"""
