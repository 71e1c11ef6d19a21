-- Close the lane of a worker that takes no more jobs: move undelivered jobs to the shared stream. Held jobs stay in the lane.
--
-- KEYS  jobs
-- ARGV  worker
--
-- Returns 1 if the lane may have more jobs to move, otherwise 0.

-- include moving

return close_lane(ARGV[1], MAX_MOVED) > 0 and 1 or 0
