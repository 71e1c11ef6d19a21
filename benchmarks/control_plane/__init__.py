"""The cost of the control plane: the server's time for workers and clients, without rows."""
