"""What pretrain, SFT, reward model, DPO and KTO share: the training with transformers' and TRL's trainers."""
