"""What pretrain, SFT, reward model and DPO share: the training with transformers' and TRL's trainers."""
