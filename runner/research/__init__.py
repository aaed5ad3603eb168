"""Judging: classes, noise, effects, promotion, pruning, lineage, tuning. Pure functions over records."""
