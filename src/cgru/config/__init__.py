"""The settings of a run: what every run has (schema), the RL method's own (reinforcement, sections), YAML (codec).

config = override(RLConfig(concept="Dogs"), ["policy.iterations=60", "critic.kind=plain"])
assert from_dict(to_dict(config)) == config
"""

from cgru.config.codec import (
    FREE,
    code_in,
    config_class,
    diff,
    dump,
    fingerprint,
    from_dict,
    is_code,
    keys,
    load,
    named_code,
    override,
    refuse_unnamed,
    refuse_unnamed_code,
    to_dict,
)
from cgru.config.reinforcement import RLConfig, as_rl
from cgru.config.schema import RunConfig, StoredConfig
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
    "CriticConfig",
    "DiagnosticsConfig",
    "PolicyConfig",
    "PromptConfig",
    "RLConfig",
    "RetentionConfig",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "StoredConfig",
    "WatchConfig",
    "as_rl",
    "code_in",
    "config_class",
    "diff",
    "dump",
    "fingerprint",
    "from_dict",
    "is_code",
    "keys",
    "load",
    "named_code",
    "override",
    "refuse_unnamed",
    "refuse_unnamed_code",
    "to_dict",
]
