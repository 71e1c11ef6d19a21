"""Tests of LoRA adapters that clients register, change and remove, with helpers for these tests."""
