"""Stages over one run folder: reward → critic → policy → edit (Alg. 1, 2 and 3); `unlearn` and `resume` are the way in.

`setting`, `reward` and `critic` build what a config names, `stages` runs what is left to do, `observer` is what happens
after each iteration.
"""

from cgru.pipeline.stages import RUNS, Interrupted, resume, unlearn

__all__ = ["RUNS", "Interrupted", "resume", "unlearn"]
