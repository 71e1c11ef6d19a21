"""What workers and clients cost the server beside their rows."""
