"""On which tasks of reasoning-gym a small model begins to answer."""
