"""A/B experiments between schedules: who gets which arm, what came of it, and what may be concluded at any time."""
