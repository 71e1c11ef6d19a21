-- Look at the queue of one model.
--
-- KEYS  jobs, dead
--
-- Jobs are removed when they end, so the first entry is the oldest in the stream that has not ended; its id carries
-- the server's time of queueing in ms. Where workers hold some, that is the first of these: no job is read for it. Not XINFO
-- or a plain XRANGE: they would send that job along.
--
-- Returns {jobs with those in the backlog, ms since the oldest was queued (0 when there is none), jobs that were given up,
-- the server's time in ms}.

-- include fair_queue

-- Of the backlog; and the longest that is read for its time.
local FIRST, MOST_READ = 32, 16384
local dead = KEYS[2]
local now, age = now_ms(), 0
local oldest = redis.pcall('XPENDING', jobs, GROUP, '-', '+', 1)[1]
if type(oldest) ~= 'table' then
  oldest = redis.call('XRANGE', jobs, '-', '+', 'COUNT', 1)[1]
end
if oldest then
  age = math.max(0, now - tonumber(string.match(oldest[1], '^%d+')))
end
local in_backlog = count_at('ZCARD', backlog)
if in_backlog > 0 then
  -- A client's oldest prompt has its first start time, and the first start times of all clients are close together.
  for _, digest in ipairs(redis.call('ZRANGE', backlog, 0, FIRST - 1)) do
    local stored = redis.call('HSTRLEN', backlog_jobs, digest) <= MOST_READ and redis.call('HGET', backlog_jobs, digest)
    local since = stored and tonumber(string.match(stored, '^%d+'))
    age = since and math.max(age, now - since) or age
  end
end
return {redis.call('XLEN', jobs) + in_backlog, age, redis.call('XLEN', dead), now}
