"""Loading of base models and adapters, and the one frozen base that PPO's four roles share."""
