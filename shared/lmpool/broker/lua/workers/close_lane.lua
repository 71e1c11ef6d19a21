-- Close the lane of a worker that takes no more jobs: move undelivered jobs to the shared stream. Held jobs stay in the lane.
--
-- KEYS  jobs
-- ARGV  worker
--
-- Returns 1 if the lane may have more jobs to move. Otherwise returns 0, and ends a read of the worker that waits for jobs.

-- include moving

if close_lane(ARGV[1], MAX_MOVED) > 0 then
  return 1
end
add_wake(ARGV[1], 0)
return 0
