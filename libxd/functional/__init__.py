"""The arithmetic of policy updates as pure numpy functions: advantages, rewards, ratios, KL, objectives, corrections.

Flat arrays, no padding: N tokens that all count (inactive ones were dropped before), B sequences, S segments (turns or
sequences). Whatever comes in, arithmetic and results are float64. d is log r = training - rollout, in nats.
ValueError for arguments that do not fit; nothing here imports anything of xd or torch.
"""
