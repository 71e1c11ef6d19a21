"""Runs SGLang on a machine without a GPU, for tests: stubs replace the GPU packages that SGLang imports."""
