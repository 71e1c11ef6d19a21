-- Count the jobs of a model's queue (shared stream, lanes, backlog) and its dead letters, and read the age of its oldest job.
--
-- KEYS  jobs, dead
--
-- Returns {number of jobs, ms since the oldest job was queued (0 without jobs), number of dead letters, server time in ms}.

-- include fair_queue

-- A client's oldest prompt in the backlog has the client's first start time, and the first start times of clients are close together.
local FIRST = 32 -- Number of prompts of each kind, the first in the backlog, whose age is read.
local MAX_READ = 16384 -- Max bytes of a stored job that is read for its age.
local dead, now, age = KEYS[2], now_ms(), 0

-- Jobs are removed when they end, so the first entry of a stream is its oldest job, and the id of this entry is the time of queueing.
-- XPENDING returns the id of a held job without the job, which may be large.
local function read_age(stream)
  local oldest = redis.pcall('XPENDING', stream, GROUP, '-', '+', 1)[1]
  if type(oldest) ~= 'table' then
    oldest = redis.pcall('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  end
  if type(oldest) == 'table' then
    age = math.max(age, now - tonumber(string.match(oldest[1], '^%d+')))
  end
end

read_age(jobs)
local workers, in_seen = longest_lanes(), 0
for _, worker in ipairs(workers) do
  read_age(lane_of .. worker)
  in_seen = in_seen + (tonumber(redis.pcall('XLEN', lane_of .. worker)) or 0)
end
-- Use the recorded sum only if there are more lanes than this call reads: the sum may be wrong after the server lost keys.
local depth = redis.call('XLEN', jobs) + (#workers == MAX_LANES and in_lanes() or in_seen)
local in_backlog = count_at('ZCARD', backlog)
for kind in pairs(in_backlog > 0 and FROM or {}) do
  for _, digest in ipairs(redis.call('ZRANGEBYSCORE', backlog, FROM[kind], TO[kind], 'LIMIT', 0, FIRST)) do
    local stored = redis.call('HSTRLEN', backlog_jobs, digest) <= MAX_READ and redis.call('HGET', backlog_jobs, digest)
    local since = stored and tonumber(string.match(stored, '^%d+'))
    age = since and math.max(age, now - since) or age
  end
end
return {depth + in_backlog, age, redis.call('XLEN', dead), now}
