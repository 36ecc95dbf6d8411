"""The page of a run, or of several runs compared."""
