"""Tests of backends; tests that run vLLM or SGLang are in `tests/contract` and `tests/engines`."""
