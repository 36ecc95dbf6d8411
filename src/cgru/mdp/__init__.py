"""Diffusion as a Markov decision process: kernels are policies, trajectories are typed records (paper §3.3, App. A).

Import from the modules (`kernel`, `trajectory`, `rollout`): re-exporting the function `rollout` would hide its module.
"""
