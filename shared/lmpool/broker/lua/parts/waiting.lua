-- The clients that wait for a prompt, for the scripts that include it. Nearly always one client waits. The waiting key is then a
-- string, which takes half as long as a hash: its reply key, a newline, and the job's entry. See keys.py.

-- include streams

-- Lifetime of a waiting key whose own lifetime another client removed.
local FALLBACK_MS = 60000

-- Returns the job's entry, LATER, DONE or false; and the reply key if one client waits alone.
local function read_waiting(waiting)
  local value = redis.pcall('GET', waiting)
  if type(value) == 'string' then
    local reply, entry = string.match(value, '^(.-)\n(.*)$')
    if entry == DONE then
      return false
    end
    return entry or false, reply
  end
  local job = value and redis.pcall('HGET', waiting, 'job')
  return type(job) == 'string' and job
end

-- Turn a string into a hash with the same lifetime, with the client that waits or without one.
local function expand(waiting, entry, reply)
  local lifetime = redis.call('PTTL', waiting)
  redis.call('UNLINK', waiting)
  redis.call('HSET', waiting, 'job', entry, unpack(reply and {reply, ''} or {}))
  redis.call('PEXPIRE', waiting, lifetime > 0 and lifetime or FALLBACK_MS)
end

-- Write where a prompt's job is now, if it was at `before` or `before` is nil. The server may have evicted the key: a new one
-- needs a lifetime.
local function place(waiting, entry, lifetime, before)
  local job, reply = read_waiting(waiting)
  if before and job ~= before then
    return
  elseif reply then
    redis.call('SET', waiting, reply .. '\n' .. entry, 'KEEPTTL')
  elseif redis.pcall('HSET', waiting, 'job', entry) == 1 then
    redis.call('PEXPIRE', waiting, lifetime)
  end
end

-- Whether a client waits for a prompt. If the server evicted the key, the deadline that the job itself carries counts.
local function is_wanted(waiting, deadline, now)
  local _, sole = read_waiting(waiting)
  local count = sole and 2 or redis.pcall('HLEN', waiting)
  if type(count) == 'table' then
    redis.call('UNLINK', waiting)
    count = 0
  end
  return count > 1 or count == 0 and now < (tonumber(deadline) or 0)
end
