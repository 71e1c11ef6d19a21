"""Trainers that use a pool as their teacher."""
