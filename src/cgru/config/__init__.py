"""Everything a run can be told: frozen dataclasses (schema, sections), and their way to and from YAML (codec).

config = override(RunConfig(concept="Dogs"), ["policy.iterations=60", "critic.kind=plain"])
assert from_dict(to_dict(config)) == config
"""

from cgru.config.codec import FREE, KEYS, diff, dump, fingerprint, from_dict, load, override, to_dict
from cgru.config.schema import RunConfig
from cgru.config.sections import (
    CriticConfig,
    DiagnosticsConfig,
    PolicyConfig,
    PromptConfig,
    RetentionConfig,
    RewardConfig,
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
