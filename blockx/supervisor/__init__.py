"""Keeps N executor processes alive: slots, forkserver, pool. Main process, main thread."""
