"""What a card adds: its facts, the memory inside its kernels, and what torch's allocator reserves on it."""
