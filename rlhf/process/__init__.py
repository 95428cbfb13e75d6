"""What holds for a whole process: its rank among others, signals that end it, settings of CUDA."""
