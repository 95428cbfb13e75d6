"""The lean trunk: a forward and backward pass in few operations, chosen by `hardware.trunk: lean`."""
