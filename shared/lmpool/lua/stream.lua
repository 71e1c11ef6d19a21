-- The stream of a model's queue, and how much is to stand in it, for the scripts that include it. See queue.lua.
local GROUP = 'workers'
-- Batches in the stream for each worker: enough to take from until the next batch has ended and more moves up.
local BATCHES = 3
-- Prompts in the stream while no worker is known.
local NOBODY = 128
-- How much further the prompts of a client that asks alone may go: what can be taken back at once.
local MORE = 2000
local FLOOD_MS = 3600000
-- What a waiting key has instead of an entry id: the job is in the backlog; its row has just been stored.
local LATER, DONE = 'later', 'done'
local jobs = KEYS[1]
local base = string.sub(jobs, 1, -6)
local backlog, flood, rooms = base .. ':backlog', base .. ':flood', base .. ':rooms'
-- What reply keys begin with.
local replies = base .. ':reply'

-- How many more prompts the stream may hold beside its `depth`, and how many more than these for a client that asks alone.
local function room(depth)
  local batches, sizes = 0, redis.pcall('HVALS', rooms)
  if sizes.err then
    redis.call('DEL', rooms)
  end
  for _, size in ipairs(sizes) do
    batches = batches + (tonumber(size) or 0)
  end
  local pending = redis.pcall('XPENDING', jobs, GROUP)
  local held = pending.err and 0 or pending[1]
  return (batches > 0 and BATCHES * batches or NOBODY) - (depth - held), batches > 0 and MORE or 0
end
