"""Running SGLang on a machine without a GPU, for tests: its GPU packages are made up before it is imported."""
