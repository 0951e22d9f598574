"""Which call runs where, and what happens when it fails. Sans-IO; its law is in README.md."""
