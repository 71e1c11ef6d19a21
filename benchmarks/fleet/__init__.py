"""A simulated fleet: many real workers and clients in few processes, and what they cost the server."""
