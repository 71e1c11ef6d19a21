"""Tests of vocabularies and of the byte strings of tokens."""
