"""A run from its config to its edit (`unlearning`), its export (`export`) and trackers."""

from cgru.interrupt import Interrupted
from cgru.pipeline.unlearning import RUNS, fit_critic, resume, unlearn

__all__ = ["RUNS", "Interrupted", "fit_critic", "resume", "unlearn"]
