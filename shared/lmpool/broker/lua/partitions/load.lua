-- Read how busy one partition of a model's queue is, in constant time.
--
-- KEYS  jobs
--
-- Returns the number of live workers that take jobs, the prompts that they compute at once, and the number of jobs, waiting and held.

-- include lanes

local alive = tonumber(redis.pcall('ZCOUNT', deadlines, now_ms(), '+inf')) or 0
local batch = tonumber(redis.pcall('HGET', capacities, '')) or 0
local depth = (tonumber(redis.pcall('XLEN', jobs)) or 0) + in_lanes() + (tonumber(redis.pcall('ZCARD', backlog)) or 0)
-- A worker that drains has no capacity, so it does not count in `worker_count`.
return {math.min(alive, worker_count), batch, depth}
