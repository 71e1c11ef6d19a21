-- How much is to stand in the stream of a model's queue, for the scripts that include it. See queue.lua.

-- include stream

-- Batches in the stream for each worker: enough to take from until the next batch has ended and more moves up.
local BATCHES = 3
-- Prompts in the stream while no worker is known.
local NOBODY = 128
-- How much further the prompts of a client that asks alone may go, and how large a job may be that does: what can soon
-- be taken back.
local MORE = 2000
local MOST_MORE_BYTES = 8192
local FLOOD_MS = 3600000

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

-- How many more prompts the stream may hold beside its `depth`, and how many more than these for a client that asks alone.
local function room(depth)
  local batches = tonumber(redis.pcall('HGET', rooms, '')) or 0
  return (batches > 0 and BATCHES * batches or NOBODY) - (depth - of_group('pending')), batches > 0 and MORE or 0
end
