"""Function source before it runs: which functions there are, their digests and entry points."""
