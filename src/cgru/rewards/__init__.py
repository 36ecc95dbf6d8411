"""Rewards r(x0, c): callables (images, prompts) -> scores in a fixed, declared range, higher is better (paper §5).

`base` has the protocol, sums and `load_reward`; `concept` the class-head rewards of the paper; `detectors` the others.
"""
