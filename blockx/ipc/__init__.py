"""The contract between main and its executors, and nothing else: frames, messages, shared rows."""
