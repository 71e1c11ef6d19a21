-- Move prompts from the backlog to the streams, for a worker that finds no jobs in the streams.
--
-- KEYS  jobs
--
-- Returns 1 if the next call may move more prompts, otherwise 0.

-- include names

if redis.call('EXISTS', backlog) == 0 then
  return 0
end

-- include fair_queue

return move_up() and 1 or 0
