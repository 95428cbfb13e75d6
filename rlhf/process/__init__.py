"""Properties of a whole process: its rank among others, what ends it, its libraries and settings of CUDA and torch."""
