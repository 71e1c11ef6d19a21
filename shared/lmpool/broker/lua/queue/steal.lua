-- Take from the end of a long lane, for a worker that holds nothing and finds nothing in its own lane and the shared stream.
--
-- KEYS  jobs
-- ARGV  worker, most jobs to take, patience in ms
--
-- Half of what waits in a lane is taken, if it would wait longer than a step: the lane's worker holds a batch already, or has
-- not come for it for long. What waits at its home would take longer anywhere else, so this is taken only when the first in the
-- lane has waited for so long as `patience`. Who takes it will be its home.
--
-- Returns how many were moved to the worker's own lane; -1 where no other worker has one.

-- include moving

local thief, want, patience = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
-- How long a worker that holds less than a batch may leave a job in its lane.
local LATE_MS = 100

-- What may be taken of a lane.
local function take_from(worker)
  local stream = lane_of .. worker
  local queued = redis.pcall('XLEN', stream)
  if type(queued) == 'table' then
    return {}
  end
  local group = group_at(stream)
  local half = math.ceil((queued - group.pending) / 2)
  local oldest = half > 0 and redis.pcall('XRANGE', stream, '(' .. group['last-delivered-id'], '+', 'COUNT', 1)[1]
  if not oldest then
    return {}
  end
  local batch = tonumber(redis.pcall('HGET', capacities, worker)) or 0
  local waited = now_ms() - tonumber(string.match(oldest[1], '^%d+'))
  if waited < LATE_MS and group.pending < batch then
    return {}
  end
  -- From the end, up to the first that is at its home.
  return (find_to_move(worker, math.min(half, want), true, function(job)
    return (waited >= patience or job.home ~= worker) and true or nil
  end))
end

if not has_lanes then
  return -1
end
-- One that leaves, or was taken for gone, takes nothing.
if redis.pcall('HEXISTS', capacities, thief) ~= 1 then
  return 0
end
for _, worker in ipairs(longest_lanes()) do
  local taken = worker ~= thief and take_from(worker) or {}
  if #taken > 0 then
    move(worker, thief, taken, #taken, 1, -1)
    return #taken
  end
end
return 0
