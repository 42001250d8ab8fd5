"""The layer in plain PyTorch, whose BF16 result has the same bits on every machine."""
