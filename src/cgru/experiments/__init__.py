"""The definitions of the paper's experiments, and their runners.

`cells` defines one unit of work, `scales` the sizes of the experiments, `paper` the cells of each table of the paper.
`local_runner` runs cells on this machine and can resume; `sweep` and `cluster` run them on Ray. report/paper/page.py
makes the page from their files.
"""
