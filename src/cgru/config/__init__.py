"""Everything a run can be told: frozen dataclasses (schema), and their way to and from YAML and `key=value` (codec).

config = override(RunConfig(concept="Dogs"), ["policy.iterations=60", "critic.kind=plain"])
assert from_dict(to_dict(config)) == config
"""

from cgru.config.codec import FREE, KEYS, diff, dump, fingerprint, from_dict, load, override, to_dict
from cgru.config.schema import (
    CriticConfig,
    DiagnosticsConfig,
    PolicyConfig,
    PromptConfig,
    RetentionConfig,
    RewardConfig,
    RunConfig,
    SamplingConfig,
    WatchConfig,
)

__all__ = [
    "FREE",
    "KEYS",
    "CriticConfig",
    "DiagnosticsConfig",
    "PolicyConfig",
    "PromptConfig",
    "RetentionConfig",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "WatchConfig",
    "diff",
    "dump",
    "fingerprint",
    "from_dict",
    "load",
    "override",
    "to_dict",
]
