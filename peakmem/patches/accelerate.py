"""accelerate: the device on which trainers put models and batches, by accelerate's own variable."""

DEVICE = {"ACCELERATE_TORCH_DEVICE": "meta"}  # of the environment; accelerate looks for accelerators in no other way
