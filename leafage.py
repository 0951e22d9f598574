"""Chain state for user functions: the same import in an executor and in a notebook."""

from blockx.sdk.leafage import ChainState, web3

__all__ = ["ChainState", "web3"]
