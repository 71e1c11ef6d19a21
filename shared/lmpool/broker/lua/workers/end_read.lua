-- End a read of a worker that waits for jobs: add an entry to its lane, which the worker removes.
--
-- KEYS  jobs
-- ARGV  worker

-- include streams

add_wake(ARGV[1], 0)
return 1
