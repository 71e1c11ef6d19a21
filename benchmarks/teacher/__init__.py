"""Measures of a pool as a teacher: of the values that distillation computes from its responses."""
