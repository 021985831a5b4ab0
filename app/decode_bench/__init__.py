"""Whole answers of every schedule, interleaved with plain decoding: what they took, and what explains it."""
