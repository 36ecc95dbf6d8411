"""Speed and memory: compiled networks, fixed batch shapes, batch-invariant layers, low memory; same results."""
