-- Close the lane of a worker that takes no more jobs: jobs that it was not given go to the shared stream. Held jobs stay.
--
-- KEYS  jobs
-- ARGV  worker
--
-- Returns 1 if there may be more to move, otherwise 0.

-- include moving

return close_lane(ARGV[1], MAX_MOVED) > 0 and 1 or 0
