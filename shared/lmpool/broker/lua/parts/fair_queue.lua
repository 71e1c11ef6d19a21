-- Fair queueing of a model's prompts, for the scripts that include it. KEYS[1] is the stream of jobs.
--
-- Workers read the stream in the order of its entries, so what stands in it is waited for by everybody behind it. It
-- holds some batches only, its capacity; the rest waits in the backlog, a sorted set of digests in the order of their
-- virtual start times, with the jobs in a hash beside it, and moves up as workers take from the stream.
--
-- This is fair queueing. The virtual time is the start time of the prompt that moved up last. A client's first prompt
-- starts one after the virtual time, each further one one later, so clients move up one prompt each in rotation, however
-- many each has queued. "virtual_time" is a sorted set: the virtual time under "" and the start time of each client's last
-- prompt under its reply key, so the difference is how many prompts the client has in the backlog.
--
-- Moving through the backlog costs a third of a prompt's time in the server, and as long as one client asks alone it is for
-- nothing. So that client may have more in the stream than its capacity, with the digests; "sole_client" then has its reply
-- key. When another client comes, what is beyond the capacity goes back to the backlog, some of it in each call; meanwhile
-- "sole_client" has the reply key behind a "-". It is empty where the stream has more than its capacity that nobody asked
-- for alone: workers have gone.
--
-- While a script runs, nobody else is served. So each call does a bounded part of what there is to do, whatever is stored,
-- and the next ones do the rest.
--
-- The keys that are not among KEYS carry the model's hash tag, as KEYS[1] does.

-- include capacity

-- How much one call moves up, and takes back.
local MOST_MOVED, MOST_MOVED_BYTES, MOST_BACK, PART_BACK = 128, 524288, 128, 4
local PART, MOST_AT_ONCE = 32, 500
-- The value of "sole_client" when nothing is to be taken back.
local NO_SOLE_CLIENT = ''
local backlog_jobs, virtual_time = base .. ':backlog:jobs', base .. ':virtual_time'

-- include time

-- What a command counts at a key; a value of another type is removed.
local function count_at(command, key)
  local count = redis.pcall(command, key)
  if type(count) == 'table' then
    redis.call('UNLINK', key)
    return 0
  end
  return count
end

-- The start time of a client's last prompt, or of "" the virtual time; what is no finite number is 0.
local function last_start(client)
  local start = tonumber(redis.call('ZSCORE', virtual_time, client) or 0)
  return start - start == 0 and start or 0
end

local function virtual_now()
  count_at('ZCARD', virtual_time)
  return last_start('')
end

-- Say where a prompt's job is. A server that is short of memory may have dropped the key: one that is new expires too.
local function place(waiting, job, lifetime)
  if redis.pcall('HSET', waiting, 'job', job) == 1 then
    redis.call('PEXPIRE', waiting, lifetime)
  end
end

-- Put jobs into the backlog: start times and digests, and digests and what is stored of their jobs, one after the other.
local function to_backlog(order, stored)
  count_at('HLEN', backlog_jobs)
  for at = 1, #order, MOST_AT_ONCE do
    local last = math.min(#order, at + MOST_AT_ONCE - 1)
    redis.call('ZADD', backlog, unpack(order, at, last))
    redis.call('HSET', backlog_jobs, unpack(stored, at, last))
  end
end

-- Take the last of `excess` jobs of the stream back into the backlog, with the first start times of the client
-- that queued them.
-- Returns how many were taken. What stays may be large, so the entries are read a few at a time.
local function take_back(excess, client)
  local order, stored, seen, bytes, before = {}, {}, 0, 0, '+'
  local most, now = math.min(excess, MOST_BACK), virtual_now()
  while seen < most and bytes < MOST_MOVED_BYTES do
    local last = redis.call('XREVRANGE', jobs, before, '-', 'COUNT', math.min(most - seen, seen + 1, PART_BACK))
    if #last == 0 then
      break
    end
    for _, item in ipairs(last) do
      local entry, fields = item[1], item[2]
      local lifetime, digest = string.match(fields[4] or '', '^(%d+) (.+)$')
      if digest then
        -- The start times before these are for what is before these in the stream.
        order[#order + 1], order[#order + 2] = now + excess - seen, digest
        local since = string.match(entry, '^%d+')
        stored[#stored + 1], stored[#stored + 2] = digest, since .. ' ' .. lifetime .. ' ' .. fields[2]
        redis.call('XDEL', jobs, entry)
        place(base .. ':waiting:' .. digest, LATER, lifetime)
      end
      seen, bytes, before = seen + 1, bytes + #(fields[2] or ''), '(' .. entry
    end
  end
  if #order > 0 then
    to_backlog(order, stored)
    -- It may have more in the backlog, which start later.
    redis.call('ZADD', virtual_time, math.max(order[1], last_start(client)), client)
  end
  return #order / 2
end

-- Take back what a client that does not ask alone any more has in the stream beyond the capacity: a part of it.
-- Returns whether there is more.
local function give_way(excess, sole)
  -- A server that is short of memory may have dropped the key: then it was somebody's.
  local client = type(sole) == 'string' and string.gsub(sole, '^-', '') or '?'
  local taken = take_back(excess, client)
  if taken > 0 and taken < excess then
    redis.call('SET', sole_client, '-' .. client, 'PX', SOLE_CLIENT_MS)
    return true
  elseif taken == 0 then
    -- What is there stays, and need not be looked at each time.
    redis.call('SET', sole_client, NO_SOLE_CLIENT, 'PX', SOLE_CLIENT_MS)
  else
    redis.call('UNLINK', sole_client)
  end
  return false
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
    if count_at('ZCARD', virtual_time) > 0 and redis.call('ZSCORE', virtual_time, client) then
      redis.call('ZINCRBY', virtual_time, -1, client)
    end
  end
end

-- The first prompts of the backlog, at most `count`, and as many as one call may move whatever they weigh; they leave it.
-- Returns their digests, what is stored of their jobs, the start time of the last, and how many bytes that is.
local function pop(count, most_bytes)
  local first, bytes = redis.call('ZPOPMIN', backlog, count), 0
  local digests, rest, start = {}, {}, nil
  for at = 1, #first, 2 do
    local size = #rest == 0 and redis.call('HSTRLEN', backlog_jobs, first[at]) or 0
    if #rest > 0 or at > 1 and bytes + size > most_bytes then
      rest[#rest + 1], rest[#rest + 2] = first[at + 1], first[at]
    else
      digests[#digests + 1], start, bytes = first[at], first[at + 1], bytes + size
    end
  end
  if #rest > 0 then
    redis.call('ZADD', backlog, unpack(rest))
  end
  local stored = {}
  if #digests > 0 then
    stored = redis.call('HMGET', backlog_jobs, unpack(digests))
    redis.call('HDEL', backlog_jobs, unpack(digests))
  end
  return digests, stored, start, bytes
end

-- Move prompts up from the backlog while the stream has capacity. Those that nobody waits for any more are dropped.
-- Returns whether there may be more to move.
local function move_up()
  if count_at('ZCARD', backlog) == 0 then
    return false
  end
  count_at('HLEN', backlog_jobs)
  count_at('ZCARD', virtual_time)
  local free = spare_capacity(redis.call('XLEN', jobs))
  local sole = free < 0 and redis.pcall('GET', sole_client)
  if type(sole) == 'string' and string.sub(sole, 1, 1) == '-' then
    return give_way(-free, sole)
  end
  local moved, bytes, last, now = 0, 0, nil, now_ms()
  while free > 0 and moved < MOST_MOVED and bytes < MOST_MOVED_BYTES do
    local digests, stored, start, size = pop(math.min(free, PART), MOST_MOVED_BYTES - bytes)
    if #digests == 0 then
      break
    end
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
        redis.call('UNLINK', waiting)
      end
    end
    moved, bytes, last = moved + #digests, bytes + size, start
  end
  if redis.call('EXISTS', backlog) == 0 then
    -- Nobody has anything in the backlog: the virtual time begins anew.
    redis.call('UNLINK', virtual_time, backlog_jobs)
    return false
  end
  if last then
    redis.call('ZADD', virtual_time, last, '')
  end
  return free > 0
end
