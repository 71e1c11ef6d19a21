-- The capacity of the streams, and the lane of a job, for the scripts that include it. See "Lanes" in docs/design/queue.md.
--
-- Siblings are jobs that continue the same prompt: they leave their home together. A call reads as many of the shortest lanes as it
-- has jobs, so its time does not grow with the number of workers.

-- include streams
-- include time

-- Batches for each worker that wait in the streams: enough until the next batch has ended and more prompts move up; batches that count
-- as held (the lengths of lanes include held jobs, and asking each lane would take long); jobs in the streams without a known worker.
local BATCHES, HELD_BATCHES, WITHOUT_WORKERS = 3, 2, 128
-- Batches for each worker, waiting and held, up to which bulk clients add jobs: one is computed, one is next. Continuations get
-- one batch more, so that bulk clients never keep them out.
local BULK_BATCHES, CONTINUED_BATCHES = 2, 3
-- A home's lane may have FACTOR times the mean and SLACK jobs more. SLACK keeps short lanes from moving single jobs. Homes give up
-- jobs if a lane is shorter than the share UNEVEN of the mean.
local FACTOR, SLACK, UNEVEN = 1.25, 2, 0.5
-- Max lanes read per call; lanes read beyond the jobs, as workers may have left; max length, as clients may write any number.
local MAX_READ, MORE, MAX_LENGTH = 1000, 8, 100000

-- Workers that take jobs; the hash also holds the sum of their capacities. A single worker reads the shared stream only.
local worker_count = math.max(0, (tonumber(redis.pcall('HLEN', capacities)) or 0) - 1)
local has_lanes = worker_count > 1
-- By worker: whether it takes jobs; the length that its lane will have; jobs that this call has added.
local open, length, added = {}, {}, {}
-- Workers with the shortest lanes; the mean length; the longest that a home's lane may be; the time of `open_lanes`.
local shortest, mean, max_length, opened_at = {}, 0, 0, nil
-- The worker that took the previous siblings of the next job, if they left their home.
local sibling_worker

-- How many jobs of each kind the streams may take, negative if they hold too many; and how many jobs they have.
local function spare_capacity()
  local batch, waiting, laned = tonumber(redis.pcall('HGET', capacities, '')) or 0, redis.call('XLEN', jobs), in_lanes()
  local depth = waiting + laned
  local spare = (batch > 0 and BATCHES * batch or WITHOUT_WORKERS) - (waiting - group_at(jobs).pending)
  if laned > 0 or has_lanes then
    spare = spare + HELD_BATCHES * batch - laned
  end
  local bulk = (batch > 0 and BULK_BATCHES * batch or WITHOUT_WORKERS / 2) - depth
  local continued = bulk + (CONTINUED_BATCHES - BULK_BATCHES) * batch
  return {[ROWS] = spare, [BULK] = math.min(spare, bulk), [CONTINUED] = math.min(spare, continued)}, depth
end

-- Whether a worker takes jobs: it has a capacity, and its deadline has not passed.
local function is_open(worker)
  if open[worker] == nil then
    local deadline = tonumber(redis.pcall('ZSCORE', deadlines, worker))
    open[worker] = deadline and deadline >= opened_at and redis.pcall('HEXISTS', capacities, worker) == 1 or false
  end
  return open[worker]
end

local function read_length(score)
  local value = tonumber(score) or 0
  return value > 0 and math.floor(math.min(value, MAX_LENGTH)) or 0
end

-- Count a job in the lane of its home before it is placed. Returns whether that lane takes jobs.
local function announce(home)
  if home == '' or not is_open(home) then
    return false
  end
  length[home] = (length[home] or read_length(redis.pcall('ZSCORE', lanes, home))) + 1
  return true
end

-- The worker with the shortest lane, or nil.
local function shortest_lane()
  local best
  for _, worker in ipairs(shortest) do
    if (not best or length[worker] < length[best]) and is_open(worker) then
      best = worker
    end
  end
  return best
end

-- Prepare to place `count` jobs. The jobs with the given homes count in the lanes of their homes first, so that the mean is the mean
-- of the whole call. Returns by number of a job whether the lane of its home takes jobs.
local function open_lanes(count, homes)
  local announced, homeless = {}, count
  if not has_lanes then
    return announced
  end
  opened_at, shortest, length = now_ms(), {}, {}
  mean = (in_lanes() + count) / worker_count
  max_length = FACTOR * mean + SLACK
  local scores = redis.pcall('ZRANGE', lanes, 0, math.min(count, MAX_READ) + MORE, 'WITHSCORES')
  for at = 1, #scores, 2 do
    if scores[at] ~= '' then
      shortest[#shortest + 1], length[scores[at]] = scores[at], read_length(scores[at + 1])
    end
  end
  for i, home in ipairs(homes) do
    announced[i] = announce(home)
    homeless = homeless - (announced[i] and 1 or 0)
  end
  -- If a lane would stay short, homes give up jobs. The jobs without a home go to the shortest lanes.
  local worker = mean >= SLACK and shortest_lane()
  if worker and length[worker] + homeless / worker_count < UNEVEN * mean then
    max_length = mean
  end
  return announced
end

-- The worker whose lane a job goes to, or nil for the shared stream.
local function choose(home, is_announced, is_sibling)
  if not opened_at then
    return nil
  end
  local worker = is_sibling and sibling_worker or nil
  sibling_worker = worker
  if is_announced or announce(home) then
    if length[home] < max_length + 1 and not (worker and length[worker] < mean) then
      return home
    end
    length[home] = length[home] - 1
  end
  if not (worker and length[worker] < max_length) then
    worker = shortest_lane()
  end
  sibling_worker = worker
  if worker then
    length[worker] = length[worker] + 1
  end
  return worker
end

-- Add a job to the lane of a worker, or to the shared stream for nil. Returns its entry.
local function add_job(worker, kind, ...)
  if kind then
    return add_job(worker, nil, 'p', kind, ...)
  end
  local id = worker and redis.pcall('XADD', lane_of .. worker, '*', ...)
  if type(id) == 'string' then
    added[worker] = (added[worker] or 0) + 1
    return id .. ' ' .. worker
  end
  -- Without a worker, or if the lane's key holds something else than a stream.
  return redis.call('XADD', jobs, '*', ...)
end

-- Write the lengths of the lanes that jobs were added to.
local function count_added()
  for worker, count in pairs(added) do
    count_in_lane(worker, count)
  end
  added = {}
end
