-- How many jobs the streams of a model's queue hold, and may hold, for the scripts that include it. See fair_queue.lua.

-- include names

-- Batches waiting in the streams for each worker: enough to take from until the next batch has ended and more moves up.
local BATCHES = 3
-- Lengths of lanes count what is held too: of each worker so many batches of it are taken to be. Its read brings one of its
-- lane and one of the shared stream. To ask each lane what of it is held would take long.
local HELD_BATCHES = 2
-- Batches for each worker, waiting and held, beyond which bulk clients add nothing: one is computed, and one comes next.
local BULK_BATCHES = 2
-- The same for continuations of other clients: one batch more, so that bulk clients never keep them out.
local CONTINUED_BATCHES = 3
-- Jobs in the stream while no worker is known.
local WITHOUT_WORKERS = 128
-- How many more jobs a client that asks alone may have there, and how large each of these may be: what can soon be taken
-- back.
local SOLE_EXTRA = 2000
local SOLE_MAX_BYTES = 8192
local SOLE_CLIENT_MS = 3600000
-- For how long a bulk client does not ask alone after it has given way: as long as workers expect more prompts of interactive
-- clients (QUIET_S of yielding.py).
local BULK_SHY_MS = 60000

-- How many workers take jobs; the sum stands beside them. Whether lanes are in use: one worker alone has no use for one.
local worker_count = math.max(0, (tonumber(redis.pcall('HLEN', capacities)) or 0) - 1)
local has_lanes = worker_count > 1

-- What a stream tells of its group of workers. Not XPENDING: its summary goes through all consumers.
local function group_at(stream)
  for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', stream)) do
    local figures = {}
    for at = 1, #group, 2 do
      figures[group[at]] = group[at + 1]
    end
    if figures.name == GROUP then
      return figures
    end
  end
  return {consumers = 0, pending = 0, ['last-delivered-id'] = '0-0'}
end

-- How many jobs lie in all lanes.
local function in_lanes()
  local sum = tonumber(redis.pcall('ZSCORE', lanes, '')) or 0
  return sum > 0 and sum < 1e9 and sum or 0
end

-- Whether a reply key is that of a bulk client, or a value of "sole_client" names one.
local function is_bulk_client(sole)
  return type(sole) == 'string' and string.find(sole, bulk_replies, 1, true) and true or false
end

-- How many jobs the streams may take beside `shared` in the shared one and `laned` in the lanes (less than 0: they hold too
-- many), how many of bulk clients, how many more than these from a client that asks alone, and how many continuations of
-- other clients.
local function spare_capacity(shared, laned)
  local batches = tonumber(redis.pcall('HGET', capacities, '')) or 0
  local spare = (batches > 0 and BATCHES * batches or WITHOUT_WORKERS) - (shared - group_at(jobs).pending)
  if laned > 0 or has_lanes then
    spare = spare + HELD_BATCHES * batches - laned
  end
  local bulk_spare = (batches > 0 and BULK_BATCHES * batches or WITHOUT_WORKERS / 2) - shared - laned
  local continued_spare = bulk_spare + (CONTINUED_BATCHES - BULK_BATCHES) * batches
  return spare, math.min(spare, bulk_spare), batches > 0 and SOLE_EXTRA or 0, math.min(spare, continued_spare)
end
