"""What PPO learns with adapters in all layers or in the upper ones."""
