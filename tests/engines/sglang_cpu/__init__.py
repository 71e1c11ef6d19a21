"""SGLang on a machine without a GPU, for tests: stubs replace its GPU packages before it is imported."""
