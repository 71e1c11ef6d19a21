-- Lanes: which worker a prompt goes to, for the scripts that include it. KEYS[1] is the shared stream of jobs. See streams.lua.
--
-- Each worker has a lane, a stream of its own, so that a prompt can go to its home: the worker that has computed most of it
-- before, as the client that asks knows. A lane that is FACTOR times as long as the mean and a little more takes no more for
-- its home's sake; such a prompt, and one without a home, goes to the shortest lane. The check is made for each prompt: however
-- hot a home is, its worker gets no more than FACTOR times its part. One worker alone has no use for a lane, nor has who
-- asks while there is none: then the shared stream takes the job, which all workers read beside their lanes.
--
-- A look costs the same however many workers there are: only so many of the shortest lanes are read as there are prompts.

-- include capacity
-- include time

local FACTOR, SLACK, MOST_READ, MORE, LONGEST = 1.25, 2, 1000, 8, 100000
-- By worker: whether it takes jobs; how long its lane is; how many jobs this call has added.
local open, length, added = {}, {}, {}
-- Length -> workers whose lanes have been as short; the first and the last of these lengths.
local level, lowest, highest = {}, 0, -1
local most, lane_time = 0, nil

-- Whether a worker takes jobs: it has not left, and its deadline has not passed.
local function is_open(worker)
  if open[worker] == nil then
    local deadline = tonumber(redis.pcall('ZSCORE', deadlines, worker))
    open[worker] = deadline and deadline >= lane_time and redis.pcall('HEXISTS', capacities, worker) == 1 or false
  end
  return open[worker]
end

local function file(worker)
  local at = length[worker]
  level[at] = level[at] or {}
  table.insert(level[at], worker)
  highest = math.max(highest, at)
end

local function read_length(score)
  local value = tonumber(score) or 0
  return value > 0 and math.floor(math.min(value, LONGEST)) or 0
end

-- Make ready for `count` jobs that are to be placed. Where there are no lanes to place them in, `choose` will say so.
local function open_lanes(count)
  if not has_lanes then
    return
  end
  local workers = redis.call('HLEN', capacities) - 1
  lane_time = now_ms()
  length, level, lowest, highest = {}, {}, 0, -1
  most = FACTOR * (in_lanes() + count) / workers + SLACK
  local shortest = redis.pcall('ZRANGE', lanes, 0, math.min(count, MOST_READ) + MORE, 'WITHSCORES')
  for at = 1, #shortest, 2 do
    local worker = shortest[at]
    if worker ~= '' then
      length[worker] = read_length(shortest[at + 1])
      file(worker)
    end
  end
  while lowest <= highest and not level[lowest] do
    lowest = lowest + 1
  end
end

-- The worker with the shortest lane; nil for none.
local function shortest_lane()
  while lowest <= highest do
    local worker = level[lowest] and table.remove(level[lowest])
    if not worker then
      lowest = lowest + 1
    elseif length[worker] > lowest then
      file(worker)
    elseif is_open(worker) then
      return worker
    end
  end
end

-- The worker whose lane a job goes to, nil for the shared stream.
local function choose(home)
  if not lane_time then
    return nil
  end
  if home and home ~= '' and is_open(home) then
    length[home] = length[home] or read_length(redis.pcall('ZSCORE', lanes, home))
    if length[home] < most then
      length[home] = length[home] + 1
      return home
    end
  end
  local worker = shortest_lane()
  if worker then
    length[worker] = length[worker] + 1
    file(worker)
  end
  return worker
end

-- Add a job to the lane of a worker, or to the shared stream for nil. Returns its entry, for its waiting key.
local function add_job(worker, ...)
  local id = worker and redis.pcall('XADD', lane_of .. worker, '*', ...)
  if type(id) == 'string' then
    added[worker] = (added[worker] or 0) + 1
    return id .. ' ' .. worker
  end
  -- No lane, or somebody has spoilt it.
  return redis.call('XADD', jobs, '*', ...)
end

-- Have the lanes count what was added.
local function count_added()
  for worker, count in pairs(added) do
    count_in_lane(worker, count)
  end
  added = {}
end
