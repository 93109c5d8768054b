"""The JSON Schemas of every file xd reads or writes (data only; read through libxd.schema)."""
