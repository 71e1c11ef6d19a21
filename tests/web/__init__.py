"""The service of `lmpool web`, over HTTP and in a real browser."""
