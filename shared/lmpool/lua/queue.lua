-- A model's queue: what scripts that use it begin with. KEYS[1] is the stream of jobs.
--
-- Workers read the stream in the order of its entries, so what stands in it is waited for by everybody behind it. It
-- holds some batches only; the rest waits in the backlog, a sorted set of digests in the order of their turns, with
-- the jobs in a hash beside it, and moves up as workers take from the stream.
--
-- Turns are those of fair queueing. The clock is the turn of whoever moved up last. A client's first prompt gets
-- the turn after the clock, each further one the turn after that, so clients move up one prompt each in rotation,
-- however many each has queued. "turns" has the clock under "" and each client's last turn under its reply key, so
-- the difference is how many prompts the client has in the backlog.
--
-- The keys that are not among KEYS carry the model's hash tag, as KEYS[1] does.
local GROUP = 'workers'
-- Batches in the stream for each worker: enough to take from until the next batch has ended and more moves up.
local BATCHES = 3
-- Prompts in the stream while no worker is known.
local NOBODY = 128
local MOST_LOOKED_AT = 1000
local LATER, DONE = 'later', 'done'
local jobs = KEYS[1]
local base = string.sub(jobs, 1, -6)
local backlog, backlog_jobs, turns = base .. ':backlog', base .. ':backlog:jobs', base .. ':turns'

-- How much a command counts at a key; what is there and is something else than ours goes.
local function count_at(command, key)
  local count = redis.pcall(command, key)
  if type(count) == 'table' then
    redis.call('DEL', key)
    return 0
  end
  return count
end

-- How many more prompts the stream may hold.
local function room()
  local batches = 0
  count_at('HLEN', base .. ':rooms')
  for _, batch in ipairs(redis.call('HVALS', base .. ':rooms')) do
    batches = batches + (tonumber(batch) or 0)
  end
  local pending = redis.pcall('XPENDING', jobs, GROUP)
  local held = pending.err and 0 or pending[1]
  return (batches > 0 and BATCHES * batches or NOBODY) - (redis.call('XLEN', jobs) - held)
end

local function clock()
  count_at('HLEN', turns)
  return tonumber(redis.call('HGET', turns, '') or 0) or 0
end

-- Add a job to the stream; `since` is when it was queued, in ms, if that was earlier.
local function to_stream(waiting, job, since)
  local entry
  if since then
    entry = redis.call('XADD', jobs, '*', 'm', job, 't', since)
  else
    entry = redis.call('XADD', jobs, '*', 'm', job)
  end
  redis.call('HSET', waiting, 'job', entry)
end

local function to_backlog(waiting, digest, job, turn)
  local now = redis.call('TIME')
  count_at('HLEN', backlog_jobs)
  redis.call('ZADD', backlog, turn, digest)
  redis.call('HSET', backlog_jobs, digest, string.format('%d%03d ', now[1], math.floor(now[2] / 1000)) .. job)
  redis.call('HSET', waiting, 'job', LATER)
end

-- Take a prompt out of the backlog; `client` is who had queued it, as far as is known.
local function drop_later(digest, client)
  if redis.call('ZREM', backlog, digest) == 1 then
    redis.call('HDEL', backlog_jobs, digest)
    if count_at('HLEN', turns) > 0 and redis.call('HEXISTS', turns, client) == 1 then
      redis.pcall('HINCRBY', turns, client, -1)
    end
  end
end

-- Move prompts up from the backlog while the stream has room. Those that nobody waits for any more are dropped.
-- Returns whether there may be more to move: one call does not look at more than MOST_LOOKED_AT.
local function move_up()
  if count_at('ZCARD', backlog) == 0 then
    return false
  end
  count_at('HLEN', backlog_jobs)
  count_at('HLEN', turns)
  local free, looked_at, now = room(), 0, nil
  while free > 0 and looked_at < MOST_LOOKED_AT do
    local first = redis.call('ZPOPMIN', backlog, math.min(free, MOST_LOOKED_AT - looked_at))
    if #first == 0 then
      break
    end
    for i = 1, #first, 2 do
      local digest, waiting = first[i], base .. ':waiting:' .. first[i]
      local stored = redis.call('HGET', backlog_jobs, digest)
      looked_at, now = looked_at + 1, first[i + 1]
      local space = stored and string.find(stored, ' ', 1, true)
      if space and count_at('HLEN', waiting) > 1 then
        to_stream(waiting, string.sub(stored, space + 1), string.sub(stored, 1, space - 1))
        free = free - 1
      else
        redis.call('DEL', waiting)
      end
      redis.call('HDEL', backlog_jobs, digest)
    end
  end
  if redis.call('EXISTS', backlog) == 0 then
    -- Nobody has a turn any more: the clock begins anew.
    redis.call('DEL', turns, backlog_jobs)
    return false
  end
  if now then
    redis.call('HSET', turns, '', now)
  end
  return free > 0
end
