"""Numerical contracts (data only; read through libxd.contract)."""
