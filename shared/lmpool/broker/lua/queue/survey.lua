-- Depth and age of a model's queue: shared stream, lanes and backlog.
--
-- KEYS  jobs, dead
--
-- Returns {number of jobs, ms since the oldest was queued (0 if there is none), number of dead letters, server time in ms}.

-- include fair_queue

-- Prompts of each kind in the backlog whose age is read, and max bytes of these. A client's oldest prompt has its first start time,
-- and the first start times of all clients are close together.
local FIRST, MAX_READ = 32, 16384
local dead, now, age = KEYS[2], now_ms(), 0

-- Jobs are removed when they end, so the first entry of a stream is its oldest job, and its id has the time of queueing. XPENDING
-- returns the id of a held job without the job, which may be large.
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
-- The sum may be wrong after the server lost keys, so it is used only if there are more lanes.
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
