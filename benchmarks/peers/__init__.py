"""What the pool is compared with: processes, and an environment for those that have no need of lmpool."""
