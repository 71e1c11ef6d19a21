-- Move prompts up from the backlog, for a worker that finds no jobs.
--
-- KEYS  jobs
--
-- Returns 1 if the next call may move more, otherwise 0.

-- include names

if redis.call('EXISTS', backlog) == 0 then
  return 0
end

-- include fair_queue

return move_up() and 1 or 0
