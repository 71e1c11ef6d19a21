-- Move jobs from the end of a long lane to the lane of a worker without jobs. Home: the worker that computed a prefix of a prompt.
--
-- KEYS  jobs
-- ARGV  worker, max jobs to take, patience in ms: a job is taken from its home only if the first job of the lane has waited longer
-- See "Reading" in docs/design/queue.md. Returns the number of moved jobs; -1 if no other worker has a lane.

-- include moving

local thief, max_taken, patience = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
-- Max ms for which a worker that holds less than a batch may leave a job in its lane: longer than a round trip to a busy server.
local LATE_MS = 100

-- The jobs to take from the lane of a worker, the last job of the lane first.
local function jobs_to_take(worker)
  local stream = lane_of .. worker
  local queued, group = redis.pcall('XLEN', stream), group_at(stream)
  local half = math.ceil(((tonumber(queued) or 0) - group.pending) / 2)
  local oldest = half > 0 and redis.pcall('XRANGE', stream, '(' .. group['last-delivered-id'], '+', 'COUNT', 1)[1]
  if not oldest then
    return {}
  end
  local batch = tonumber(redis.pcall('HGET', capacities, worker)) or 0
  local waited = now_ms() - tonumber(string.match(oldest[1], '^%d+'))
  if waited < LATE_MS and group.pending < batch then
    return {}
  end
  return find_to_move(worker, math.min(half, max_taken, MAX_MOVED), true, function(job)
    return waited < patience and job.home == worker
  end)
end

if not has_lanes then
  return -1
elseif redis.pcall('HEXISTS', capacities, thief) ~= 1 then
  -- A worker that drains steals no jobs, and neither does a worker that other workers have removed as dead.
  return 0
end
for _, worker in ipairs(longest_lanes()) do
  local taken = worker ~= thief and jobs_to_take(worker) or {}
  if #taken > 0 then
    local in_order = {}
    for at, job in ipairs(taken) do
      in_order[#taken + 1 - at] = job
    end
    move(thief, in_order)
    return #taken
  end
end
return 0
