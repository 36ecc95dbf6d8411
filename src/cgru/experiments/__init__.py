"""The paper's experiments as committed definitions, and what runs them.

`cells` is what one piece of work is, `scales` how much of it, `paper` which cells make which table of the paper, `work`
does them, resumable. The page is report/reproduction.py's, which reads only the files that are left behind.
"""
