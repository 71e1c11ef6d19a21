"""Models and tokenizers for tests."""
