"""Where cases come from: each module has `case(random, place, reference)`, which damages something below `place`."""
