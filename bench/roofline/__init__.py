"""The least time that a step can take on a device."""
