"""`python -m bench.peer`: our steps beside those of TRL's trainers, and PPO's parts beside transformers and peft."""
