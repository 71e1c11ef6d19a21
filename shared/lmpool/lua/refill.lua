-- Move prompts up from the backlog, for a worker that finds nothing in the stream.
--
-- KEYS  jobs
--
-- Returns 1 when it is to be called again at once, for there may be more to move.

-- include queue

return move_up() and 1 or 0
