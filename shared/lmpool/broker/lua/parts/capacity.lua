-- How many jobs the streams of a model's queue may hold, for the scripts that include it. See fair_queue.lua.

-- include streams

-- Batches waiting in the streams for each worker: enough to take from until the next batch has ended and more moves up.
local BATCHES = 3
-- Batches that a worker holds at most: in the lanes what is held counts too, for to ask each would take long.
local HELD_BATCHES = 2
-- Jobs in the stream while no worker is known.
local WITHOUT_WORKERS = 128
-- How many more jobs a client that asks alone may have there, and how large each of these may be: what can soon be taken
-- back.
local SOLE_EXTRA = 2000
local SOLE_MOST_BYTES = 8192
local SOLE_CLIENT_MS = 3600000

-- Whether lanes are in use: one worker alone has no use for one.
local has_lanes = (tonumber(redis.pcall('HLEN', capacities)) or 0) > 2

-- How many jobs the streams may take beside `shared` in the shared one and `laned` in the lanes (less than 0: they hold too
-- many), and how many more than these from a client that asks alone.
local function spare_capacity(shared, laned)
  local batches = tonumber(redis.pcall('HGET', capacities, '')) or 0
  local spare = (batches > 0 and BATCHES * batches or WITHOUT_WORKERS) - (shared - of_group('pending'))
  if laned > 0 or has_lanes then
    spare = spare + HELD_BATCHES * batches - laned
  end
  return spare, batches > 0 and SOLE_EXTRA or 0
end
