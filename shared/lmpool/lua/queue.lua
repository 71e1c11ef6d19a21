-- A model's queue, for the scripts that include it. KEYS[1] is the stream of jobs.
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
-- Moving through the backlog costs a third of a prompt's time in the server, and as long as one client asks alone it is for
-- nothing. So that client's prompts may go further into the stream, with their digests; "flood" then has its reply key.
-- When another client comes, what is beyond the usual goes back to the backlog.
--
-- The keys that are not among KEYS carry the model's hash tag, as KEYS[1] does.

-- include stream

local MOST_LOOKED_AT, MOST_AT_ONCE = 1000, 500
local backlog_jobs, turns = base .. ':backlog:jobs', base .. ':turns'

-- How much a command counts at a key; what is there and is something else than ours goes.
local function count_at(command, key)
  local count = redis.pcall(command, key)
  if type(count) == 'table' then
    redis.call('DEL', key)
    return 0
  end
  return count
end

-- A number in a hash; what is none is 0.
local function number_at(key, field)
  local number = tonumber(redis.call('HGET', key, field) or 0)
  return number and number - number == 0 and number or 0
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function clock()
  count_at('HLEN', turns)
  return number_at(turns, '')
end

-- Say where a prompt's job is. A server that is short of memory may have dropped the key: one that is new expires too.
local function place(waiting, job, lifetime)
  if redis.pcall('HSET', waiting, 'job', job) == 1 then
    redis.call('PEXPIRE', waiting, lifetime)
  end
end

-- Put jobs into the backlog: turns and digests, and digests and what is stored of their jobs, one after the other.
local function to_backlog(order, stored)
  count_at('HLEN', backlog_jobs)
  for at = 1, #order, MOST_AT_ONCE do
    local last = math.min(#order, at + MOST_AT_ONCE - 1)
    redis.call('ZADD', backlog, unpack(order, at, last))
    redis.call('HSET', backlog_jobs, unpack(stored, at, last))
  end
end

-- Take the last `count` jobs of the stream back into the backlog, as the first turns of the client that queued them.
local function back(count, client)
  local order, stored, turn = {}, {}, clock()
  local last = redis.call('XREVRANGE', jobs, '+', '-', 'COUNT', count)
  for i = #last, 1, -1 do
    local entry, fields = last[i][1], last[i][2]
    local lifetime, digest = string.match(fields[4] or '', '^(%d+) (.+)$')
    if digest then
      turn = turn + 1
      order[#order + 1], order[#order + 2] = turn, digest
      local since = string.match(entry, '^%d+')
      stored[#stored + 1], stored[#stored + 2] = digest, since .. ' ' .. lifetime .. ' ' .. fields[2]
      redis.call('XDEL', jobs, entry)
      place(base .. ':waiting:' .. digest, LATER, lifetime)
    end
  end
  if #order > 0 then
    to_backlog(order, stored)
    -- It may have more in the backlog, with later turns.
    redis.call('HSET', turns, client, math.max(turn, number_at(turns, client)))
  end
end

-- Whether somebody waits. A server that is short of memory may have dropped the key: then until the job's own deadline.
local function is_wanted(waiting, till, now)
  local count = count_at('HLEN', waiting)
  return count > 1 or count == 0 and now < (tonumber(till) or 0)
end

-- Whether the job of a prompt is still in the queue.
local function is_queued(job, waiting)
  if job == LATER then
    return redis.call('ZSCORE', backlog, string.sub(waiting, -16)) and true or false
  end
  -- What stands there may be no entry id: then there is no such job either.
  return #redis.pcall('XRANGE', jobs, job, job) > 0
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
  local free = room(redis.call('XLEN', jobs))
  local looked_at, last, now = 0, nil, now_ms()
  while free > 0 and looked_at < MOST_LOOKED_AT do
    local first = redis.call('ZPOPMIN', backlog, math.min(free, MOST_AT_ONCE))
    local digests = {}
    for i = 1, #first, 2 do
      digests[#digests + 1] = first[i]
    end
    if #digests == 0 then
      break
    end
    local stored = redis.call('HMGET', backlog_jobs, unpack(digests))
    redis.call('HDEL', backlog_jobs, unpack(digests))
    for i, digest in ipairs(digests) do
      local waiting = base .. ':waiting:' .. digest
      local since, lifetime, at = string.match(stored[i] or '', '^(%d+) (%d+) ()')
      local till = at and since + lifetime
      -- What was taken back has left the backlog, so before its deadline a prompt is waited for.
      if at and (now < till or is_wanted(waiting, till, now)) then
        local job = string.sub(stored[i], at)
        local entry = redis.call('XADD', jobs, '*', 'm', job, 'u', lifetime, 't', since)
        place(waiting, entry, lifetime)
        free = free - 1
      else
        redis.call('DEL', waiting)
      end
    end
    looked_at, last = looked_at + #digests, first[#first]
  end
  if redis.call('EXISTS', backlog) == 0 then
    -- Nobody has a turn any more: the clock begins anew.
    redis.call('DEL', turns, backlog_jobs)
    return false
  end
  if last then
    redis.call('HSET', turns, '', last)
  end
  return free > 0
end
