"""What a worker has done: counted, told over HTTP, logged."""
