"""The programs that the pool is compared with, and the environment that they run in."""
