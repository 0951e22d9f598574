"""Chain state for user functions: the same import in an executor and in a notebook."""

from blockx.sdk.leafage import ChainState

__all__ = ["ChainState"]
