"""Properties of a whole process: its rank among others, the signals that end it, its CUDA settings."""
