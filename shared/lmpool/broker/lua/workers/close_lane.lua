-- Close the lane of a worker that takes nothing more: what it has not been given goes to the shared stream.
--
-- KEYS  jobs
-- ARGV  worker
--
-- What it holds stays in its lane, and it ends that.
--
-- Returns 1 when it is to be called again at once, for there may be more to move.

-- include moving

return retire(ARGV[1], MAX_MOVED_AT_ONCE) > 0 and 1 or 0
