"""Steps compared with those of TRL's and torchtune's trainers."""
