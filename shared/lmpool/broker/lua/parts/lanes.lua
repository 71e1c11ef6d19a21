-- Lanes: which worker a prompt goes to, for the scripts that include it. KEYS[1] is the shared stream of jobs. See streams.lua.
--
-- Each worker has a lane, a stream of its own, so that a prompt can go to its home: the worker that has computed most of it
-- before, as the client that asks knows. A lane that would be more than FACTOR times as long as the mean and SLACK more takes
-- no more for its home's sake; such a prompt, and one without a home, goes to the shortest lane. The check is made for each
-- prompt: however hot a home is, its worker gets no more. Prompts that continue the same one go elsewhere together, for there
-- it has to be computed once. And while some lane would have less than half of the mean, as that of a worker that has just
-- come, the others give what they would have beyond the mean.
--
-- One worker alone reads the shared stream, and has no lane; all others read it beside their lanes. Lengths count what waits
-- in a lane and what is held of it, wherever it is held.
--
-- A look costs the same however many workers there are: only so many of the shortest lanes are read as there are prompts.

-- include capacity
-- include streams
-- include time

local FACTOR, SLACK, UNEVEN, MAX_READ, MORE, LONGEST = 1.25, 2, 0.5, 1000, 8, 100000
-- By worker: whether it takes jobs; how long its lane will be; how many jobs this call has added.
local open, length, added = {}, {}, {}
-- The workers with the shortest lanes; and by length, those whose lanes have been as long, from the shortest to the longest.
local shortest, level, lowest, highest = {}, {}, 0, -1
local mean, longest_allowed, placing_since = 0, 0, nil
-- Where the siblings of a prompt went that were not to stay at their home.
local moved_to

-- Whether a worker takes jobs: it has not left, and its deadline has not passed.
local function is_open(worker)
  if open[worker] == nil then
    local deadline = tonumber(redis.pcall('ZSCORE', deadlines, worker))
    open[worker] = deadline and deadline >= placing_since and redis.pcall('HEXISTS', capacities, worker) == 1 or false
  end
  return open[worker]
end

local function put_in_level(worker)
  local at = length[worker]
  level[at] = level[at] or {}
  table.insert(level[at], worker)
  highest = math.max(highest, at)
end

local function read_length(score)
  local value = tonumber(score) or 0
  return value > 0 and math.floor(math.min(value, LONGEST)) or 0
end

-- Make ready for `count` jobs that are to be placed: first those are announced that have homes, then `level_lanes`. Where there
-- are no lanes to place them in, `choose` will say so.
local function open_lanes(count)
  if not has_lanes then
    return
  end
  placing_since = now_ms()
  shortest, length, level, lowest, highest = {}, {}, {}, 0, -1
  mean = (in_lanes() + count) / worker_count
  longest_allowed = FACTOR * mean + SLACK
  local scores = redis.pcall('ZRANGE', lanes, 0, math.min(count, MAX_READ) + MORE, 'WITHSCORES')
  for at = 1, #scores, 2 do
    if scores[at] ~= '' then
      shortest[#shortest + 1], length[scores[at]] = scores[at], read_length(scores[at + 1])
    end
  end
end

-- Count a job that is about to be placed in the lane of its home. Returns whether that takes jobs.
local function announce(home)
  if not placing_since or not home or home == '' or not is_open(home) then
    return false
  end
  length[home] = (length[home] or read_length(redis.pcall('ZSCORE', lanes, home))) + 1
  return true
end

-- See which lanes are the shortest, now that it is known what will come to them for their homes' sake. Without homes are
-- `homeless` jobs.
local function level_lanes(homeless)
  if not placing_since then
    return
  end
  local least
  for _, worker in ipairs(shortest) do
    if not least or length[worker] < least then
      least = is_open(worker) and length[worker] or least
    end
    put_in_level(worker)
  end
  while lowest <= highest and not level[lowest] do
    lowest = lowest + 1
  end
  -- What has no home goes to the shortest lanes, so they will be as much longer at least.
  if mean >= SLACK and least and least + homeless / worker_count < UNEVEN * mean then
    longest_allowed = mean
  end
end

-- The worker with the shortest lane; nil for none.
local function shortest_lane()
  while lowest <= highest do
    local worker = level[lowest] and table.remove(level[lowest])
    if not worker then
      lowest = lowest + 1
    elseif length[worker] > lowest then
      put_in_level(worker)
    elseif is_open(worker) then
      return worker
    end
  end
end

-- The worker whose lane a job goes to, nil for the shared stream. One that is announced is counted in its home's lane already; a
-- sibling continues the same prompt as the one before.
local function choose(home, is_announced, is_sibling)
  if not placing_since then
    return nil
  end
  moved_to = is_sibling and moved_to or nil
  local worker = moved_to
  if is_announced or announce(home) then
    local stays = length[home] < longest_allowed + 1
    if stays and not (worker and length[worker] < mean) then
      return home
    end
    length[home] = length[home] - 1
  end
  if not (worker and length[worker] < longest_allowed) then
    worker = shortest_lane()
  end
  moved_to = worker
  if worker then
    length[worker] = length[worker] + 1
    put_in_level(worker)
  end
  return worker
end

-- Add a job to the lane of a worker, or to the shared stream for nil. `kind` is BULK, CONTINUED or nil. Returns its entry, for its
-- waiting key.
local function add_job(worker, kind, ...)
  if kind then
    return add_job(worker, nil, 'p', kind, ...)
  end
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
