"""Networks that judge pictures and are never used for training."""
