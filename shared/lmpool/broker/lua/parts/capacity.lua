-- How many jobs the stream of a model's queue may hold, for the scripts that include it. See fair_queue.lua.

-- include names

-- Batches in the stream for each worker: enough to take from until the next batch has ended and more moves up.
local BATCHES = 3
-- Jobs in the stream while no worker is known.
local WITHOUT_WORKERS = 128
-- How many more jobs a client that asks alone may have there, and how large each of these may be: what can soon be taken
-- back.
local SOLE_EXTRA = 2000
local SOLE_MOST_BYTES = 8192
local SOLE_CLIENT_MS = 3600000

-- A figure of the group of workers, such as 'pending'. Not XPENDING: its summary goes through all consumers.
local function of_group(name)
  for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', jobs)) do
    local figures = {}
    for at = 1, #group, 2 do
      figures[group[at]] = group[at + 1]
    end
    if figures.name == GROUP then
      return figures[name]
    end
  end
  return 0
end

-- How many jobs the stream may take beside its `depth` (less than 0: it holds too many), and how many more than these from
-- a client that asks alone.
local function spare_capacity(depth)
  local batches = tonumber(redis.pcall('HGET', capacities, '')) or 0
  return (batches > 0 and BATCHES * batches or WITHOUT_WORKERS) - (depth - of_group('pending')), batches > 0 and SOLE_EXTRA or 0
end
