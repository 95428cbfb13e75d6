"""The mathematics of RLHF as pure functions: tensors in, tensors out.

Each module is imported by name: masked, logprobs, kl, gae, rewards, losses, groups. All of them share three rules:
a mask is a bool tensor, True on real tokens; the content of a padded slot (1e9, inf, NaN) changes neither a
result nor a gradient; half-precision inputs are computed and returned in float32, float64 stays float64.
"""
