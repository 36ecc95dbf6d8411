"""The page of `cgru reproduce`: the tables and figures of the paper."""
