-- Move prompts up from the backlog, for a worker that finds nothing in the stream; and take back what is in others' way.
--
-- KEYS  jobs
--
-- Returns 1 when it is to be called again at once, for there may be more to move.

-- include names

if redis.call('EXISTS', backlog) == 0 then
  return 0
end

-- Making ready for the rules of the queue takes as long as a few jobs.

-- include fair_queue

return move_up() and 1 or 0
