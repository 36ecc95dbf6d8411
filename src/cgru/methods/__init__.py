"""Methods: one file = one paper, with a frozen config and `run(backbone, task, config, run) -> Edit` (`cgru.method`).

CGRU, DDPO and DPOK are settings of one policy-gradient method (`cgru.rl`), so their files hold settings only.
"""
