"""Policy optimisation on the denoising MDP (paper §4, App. A, Alg. 2): pure maths here, the loop in `train`.

Import from the modules (`objective`, `batches`, `advantage`, `diagnostics`). None of these four reads a config, writes
a file or draws from a global generator.
"""
