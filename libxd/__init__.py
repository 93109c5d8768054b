"""libxd: which configuration change makes rollout and training log probabilities differ."""

__version__ = "0.1.0"
