"""Models: any transformers decoder over a ragged batch of tree segments, its rows of keys and values, sampling."""
