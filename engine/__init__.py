"""The decoding loop: one thread that drafts, verifies, commits and emits for all running sequences together."""
