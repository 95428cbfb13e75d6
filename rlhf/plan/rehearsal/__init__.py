"""Runs stages on tensors without data and follows their memory, at two depths and then at the recipe's."""
