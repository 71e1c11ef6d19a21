-- Find jobs for a worker whose lane and shared stream are empty: move prompts up from the backlog, or move jobs from the end of a long
-- lane to the worker's lane. Home: the worker that computed a prefix of a prompt.
--
-- KEYS  jobs
-- ARGV  worker, max jobs to take from a lane (0: none, because the worker holds jobs), patience in ms: a job is taken from its home only
--       if the first job of the lane has waited longer
-- See "Reading" in docs/design/queue.md and "Idle workers" in docs/design/many-workers.md.
--
-- Returns {number of prompts that left the backlog, number of jobs that moved to the worker's lane, ms after which the worker must check
-- again: 0 if it may wait until it is woken}.

-- include names

-- Max ms until a watcher checks once more; clients may write the record, too.
local MAX_WATCH_MS = 1000
local worker, max_taken, patience = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local in_backlog, watching = redis.call('EXISTS', backlog) == 1, redis.pcall('GET', watcher)
watching = type(watching) == 'string' and watching
-- The usual case: no other lane has jobs, or another worker watches the lanes and none is longer than a batch. The highest scores are
-- those of the sum and of the longest lane. Defining the functions below would take longer than this case.
local top = redis.pcall('ZREVRANGE', lanes, 0, 1, 'WITHSCORES')
local longest = tonumber(top[1] == '' and top[4] or top[2]) or 0
-- While a worker is recorded as the watcher, submissions wake no other worker: it checks once more when this record has expired.
local left_ms = watching == worker and redis.call('PTTL', watcher)
local watch_ms = left_ms and (left_ms > 0 and math.min(left_ms, MAX_WATCH_MS) or MAX_WATCH_MS) or 0
if not in_backlog and (longest <= 0 or longest <= max_taken and watching and watching ~= worker) then
  return {0, 0, watch_ms}
end

-- include fair_queue

local check_again -- Ms until the first job of a lane may be taken.

local function wait_for(ms)
  check_again = math.min(check_again or ms, ms)
  return {}
end

-- The jobs to take from the lane of another worker, the last job of the lane first.
local function jobs_to_take(other, batch)
  local stream = lane_of .. other
  local queued, group = redis.pcall('XLEN', stream), group_at(stream)
  local half = math.ceil(((tonumber(queued) or 0) - group.pending) / 2)
  local oldest = half > 0 and redis.pcall('XRANGE', stream, '(' .. group['last-delivered-id'], '+', 'COUNT', 1)[1]
  if not oldest then
    return {}
  end
  local waited = now_ms() - tonumber(string.match(oldest[1], '^%d+'))
  if waited < LATE_MS and group.pending < batch then
    return wait_for(LATE_MS - waited)
  end
  local found = find_to_move(other, math.min(half, max_taken, MAX_MOVED), true, function(job)
    return waited < patience and job.home == other
  end)
  -- If nothing is found after that time, the lane has no job, only entries that wake its worker.
  return waited < patience and #found == 0 and wait_for(patience - waited) or found
end

if in_backlog then
  local before = count_at('ZCARD', backlog)
  move_up()
  local moved = before - count_at('ZCARD', backlog)
  if moved > 0 then
    return {moved, 0, 0}
  elseif worker_count == 0 then
    return {0, 0, MAX_WATCH_MS} -- The server has lost the workers' capacities, which the next heartbeats restore.
  end
end
-- A worker that drains takes no jobs, and neither does a worker that other workers have removed as dead.
if max_taken == 0 or not has_lanes or redis.pcall('HEXISTS', capacities, worker) ~= 1 then
  return {0, 0, 0}
end
local others, lengths = longest_lanes()
local batches, has_jobs = #others > 0 and redis.pcall('HMGET', capacities, unpack(others)) or {}, false
for at, other in ipairs(others) do
  -- A lane that is no longer than a batch has no jobs to take unless its worker is late, for which the watcher checks.
  local batch = tonumber(batches[at]) or 0
  local is_candidate = other ~= worker and (lengths[at] > batch or lengths[at] > 0 and watching == worker)
  has_jobs = has_jobs or other ~= worker and lengths[at] > 0
  local taken = is_candidate and jobs_to_take(other, batch) or {}
  if #taken > 0 then
    local in_order = {}
    for i, job in ipairs(taken) do
      in_order[#taken + 1 - i] = job
    end
    move(worker, in_order)
    -- More jobs may wait than one worker takes: the next idle worker checks at once.
    open_lanes(1, {})
    wake(0, true)
    return {0, #taken, 0}
  end
end
-- One idle worker watches: it checks again when the first job may be taken. The others wait until they are woken.
if watching == worker and not check_again or watching and watching ~= worker or not has_jobs then
  return {0, 0, watch_ms}
end
check_again = math.ceil(check_again or LATE_MS)
redis.call('SET', watcher, worker, 'PX', math.min(check_again, LATE_MS) + WATCH_MS)
return {0, 0, check_again}
