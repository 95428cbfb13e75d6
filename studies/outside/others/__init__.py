"""Programs of other people that train on one card, on the stand-in device, at full depth."""
