"""Who drafts next, and when to stop: schedules by name."""
