"""The static audit of function sources: ``python -m blockx.audit``, its daemon, and its client."""
