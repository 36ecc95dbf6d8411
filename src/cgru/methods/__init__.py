"""Methods: one file = one paper. Each has `apply(config) -> RunConfig`: what the method fixes, laid over a preset.

CGRU, DDPO and DPOK are one policy loop (cgru.rl.train) with other settings, so a method file holds settings only.
"""
