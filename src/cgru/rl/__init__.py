"""Policy optimisation on the denoising MDP (paper §4, App. A, Alg. 2): pure maths here, the loop in `train`.

Import from the modules themselves. `objective`, `batches`, `advantage` and `diagnostics` are pure: they read no config,
write no file and never draw from a global random generator.
"""
