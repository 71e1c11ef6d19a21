-- Look at the queue of one model: its shared stream, the lanes, and the backlog.
--
-- KEYS  jobs, dead
--
-- Jobs are removed when they end, so the first entry is the oldest in a stream that has not ended; its id carries
-- the server's time of queueing in ms. Where workers hold some, that is the first of these: no job is read for it. Not XINFO
-- or a plain XRANGE: they would send that job along. Of the lanes the longest are looked at.
--
-- Returns {jobs with those in the backlog, ms since the oldest was queued (0 when there is none), jobs that were given up,
-- the server's time in ms}.

-- include fair_queue

-- Of the backlog; and the longest that is read for its time.
local FIRST, MAX_READ = 32, 16384
local dead = KEYS[2]
local now, age = now_ms(), 0
local depth = redis.call('XLEN', jobs)

local function look_at(stream)
  local oldest = redis.pcall('XPENDING', stream, GROUP, '-', '+', 1)[1]
  if type(oldest) ~= 'table' then
    oldest = redis.pcall('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  end
  if type(oldest) == 'table' then
    age = math.max(age, now - tonumber(string.match(oldest[1], '^%d+')))
  end
end

look_at(jobs)
local workers, in_seen = longest_lanes(), 0
for _, worker in ipairs(workers) do
  local length = redis.pcall('XLEN', lane_of .. worker)
  if type(length) == 'number' and length > 0 then
    look_at(lane_of .. worker)
    in_seen = in_seen + length
  end
end
-- The sum would do, but where all are seen they are counted.
depth = depth + (#workers == MAX_LANES and in_lanes() or in_seen)
local in_backlog = count_at('ZCARD', backlog)
if in_backlog > 0 then
  -- A client's oldest prompt has its first start time, and the first start times of all clients are close together.
  local firsts = redis.call('ZRANGE', backlog, 0, FIRST - 1)
  for kind, first in pairs(FIRST_START) do
    for _, digest in ipairs(redis.call('ZRANGEBYSCORE', backlog, first, LAST_START[kind], 'LIMIT', 0, FIRST)) do
      firsts[#firsts + 1] = digest
    end
  end
  for _, digest in ipairs(firsts) do
    local stored = redis.call('HSTRLEN', backlog_jobs, digest) <= MAX_READ and redis.call('HGET', backlog_jobs, digest)
    local since = stored and tonumber(string.match(stored, '^%d+'))
    age = since and math.max(age, now - since) or age
  end
end
return {depth + in_backlog, age, redis.call('XLEN', dead), now}
