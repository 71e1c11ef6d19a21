-- Choose the stream of each new job, a worker's lane or the shared stream, and compute how many more jobs the streams may take.
-- Other scripts include this file. See "Lanes" in docs/design/queue.md.
--
-- Home: the worker that computed a prefix of the prompt. Siblings: jobs that continue the same prompt; they leave their home together.
-- A call reads as many of the shortest lanes as it has jobs, so its time does not grow with the number of workers.

-- include streams
-- include time

local BATCHES = 3 -- Max waiting batches per worker in the streams: enough until a batch ends and the backlog refills the streams.
local HELD_BATCHES = 2 -- Batches per worker that count as held: lengths of lanes include held jobs, and reading each lane takes long.
local WITHOUT_WORKERS = 128 -- Max waiting jobs in the streams while no worker is known.
local BULK_BATCHES = 2 -- Max batches per worker, waiting and held, to which bulk clients add jobs: one is computed, one is next.
local CONTINUED_BATCHES = 3 -- The limit for continuations: above BULK_BATCHES, so that bulk clients never keep continuations out.
-- The lane of a home may have FACTOR times the mean length plus SLACK jobs. SLACK keeps single jobs at home while lanes are short.
local FACTOR, SLACK = 1.25, 2
local UNEVEN = 0.5 -- Homes give up jobs to a lane that is shorter than this share of the mean length.
local MAX_READ = 1000 -- Max lanes read per call.
local MORE = 8 -- Number of lanes read in addition to one per job, because some of the workers may have ended.
local LATE_MS = 100 -- Ms for which a worker with capacity may leave a job in its lane: longer than a round trip to a busy server.
local WATCH_MS = 500 -- Ms for which one idle worker watches the lanes, so that no other is woken.
local MAX_LENGTH = 100000 -- Max recorded length of a lane; a larger number counts as this length, because clients may write any number.

-- Number of workers that take jobs: `capacities` has a field for each worker and one for the sum. A single worker uses no lane.
local worker_count = math.max(0, (tonumber(redis.pcall('HLEN', capacities)) or 0) - 1)
local has_lanes = worker_count > 1
-- By worker: `open`: whether it takes jobs; `length`: jobs in its lane after this call; `added`: jobs that this call added to its lane.
local open, length, added = {}, {}, {}
-- `shortest`: workers with the shortest lanes. `mean`: mean length. `max_length`: limit of a home's lane. `opened_at`: time in ms.
local shortest, mean, max_length, opened_at = {}, 0, 0, nil
-- Worker that got the previous siblings of the next job; nil if these siblings went to their home.
local sibling_worker

-- Returns by kind how many more jobs the streams may take (negative: the streams have too many), and how many jobs the streams have.
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

-- Count a job in the length of its home's lane before the job is placed. Returns whether the home takes jobs.
local function announce(home)
  if home == '' or not is_open(home) then
    return false
  end
  length[home] = (length[home] or read_length(redis.pcall('ZSCORE', lanes, home))) + 1
  return true
end

-- The worker that takes jobs and has the shortest lane, or nil.
local function shortest_lane()
  local best
  for _, worker in ipairs(shortest) do
    if (not best or length[worker] < length[best]) and is_open(worker) then
      best = worker
    end
  end
  return best
end

-- Prepare to place `count` jobs. The jobs with `homes` count in the lanes of their homes first, so that all lengths include the whole
-- call. Returns a list: for each of these jobs, whether its home takes jobs.
local function open_lanes(count, homes)
  local announced, homeless = {}, count
  if not has_lanes then
    return announced
  end
  opened_at, shortest, length = now_ms(), {}, {}
  mean = (in_lanes() + count) / worker_count
  max_length = FACTOR * mean + SLACK
  -- Begin at a different lane in each call: the first of many empty lanes may all be of workers that were just killed.
  local most, empty = math.min(count, MAX_READ) + MORE, tonumber(redis.pcall('ZCOUNT', lanes, 0, 0)) or 0
  local from = empty > most and opened_at % (empty - most) or 0
  local scores = redis.pcall('ZRANGE', lanes, from, from + most, 'WITHSCORES')
  for at = 1, #scores, 2 do
    if scores[at] ~= '' then
      shortest[#shortest + 1], length[scores[at]] = scores[at], read_length(scores[at + 1])
    end
  end
  for i, home in ipairs(homes) do
    announced[i] = announce(home)
    homeless = homeless - (announced[i] and 1 or 0)
  end
  -- If the shortest lane would stay short even with its part of the jobs without a home, homes give up jobs to other lanes.
  local worker = mean >= SLACK and shortest_lane()
  if worker and length[worker] + homeless / worker_count < UNEVEN * mean then
    max_length = mean
  end
  return announced
end

-- Returns the worker whose lane gets a job, or nil for the shared stream.
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

-- Add a job to the lane of a worker, or to the shared stream if `worker` is nil. Returns the entry of the job.
local function add_job(worker, kind, ...)
  if kind then
    return add_job(worker, nil, 'p', kind, ...)
  end
  local id = worker and redis.pcall('XADD', lane_of .. worker, '*', ...)
  if type(id) == 'string' then
    added[worker] = (added[worker] or 0) + 1
    return id .. ' ' .. worker
  end
  -- Use the shared stream: there is no worker, or the lane's key holds something else than a stream.
  return redis.call('XADD', jobs, '*', ...)
end

-- Wake an idle worker: in `delay` ms it checks for jobs that their workers have not read. `open_lanes` must have read the lanes. Without
-- `anyway`, no worker is woken while one watches the lanes: the cost of wake-ups depends neither on the workers nor on the prompts.
local function wake(delay, anyway)
  for at = 1, #shortest do
    local worker = shortest[(opened_at + at) % #shortest + 1]
    if length[worker] == 0 then
      if not anyway and not redis.pcall('SET', watcher, worker, 'NX', 'PX', WATCH_MS) then
        return
      elseif is_open(worker) then
        redis.pcall('SET', watcher, worker, 'PX', WATCH_MS)
        return add_wake(worker, delay)
      end
      anyway = true
    end
  end
end

-- Record the new lengths of the lanes to which this call added jobs. An idle worker watches whether their workers read these jobs.
local function count_added()
  for worker, count in pairs(added) do
    count_in_lane(worker, count)
  end
  local has_added = next(added)
  added = {}
  if has_added then
    wake(LATE_MS)
  end
end
