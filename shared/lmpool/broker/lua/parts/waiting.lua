-- Read and write waiting keys: which clients wait for a prompt, and where its job is; other scripts include this file. Usually one
-- client waits. The key is then a string, which takes half as long as a hash: reply key, newline, entry of the job. See keys.py.

-- include streams

-- New lifetime in ms of a waiting key that has no lifetime, because a client removed the lifetime.
local FALLBACK_MS = 60000

-- Returns the entry of the job, LATER, DONE, or false if there is no job; and the client's reply key if one client waits alone.
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

-- Turn a waiting key from a string into a hash with the same lifetime. `reply` is the client in the hash, or nil for no client.
local function expand(waiting, entry, reply)
  local lifetime = redis.call('PTTL', waiting)
  redis.call('UNLINK', waiting)
  redis.call('HSET', waiting, 'job', entry, unpack(reply and {reply, ''} or {}))
  redis.call('PEXPIRE', waiting, lifetime > 0 and lifetime or FALLBACK_MS)
end

-- Write the new entry of a prompt's job, if the old entry is `before` or `before` is nil. If the key was evicted, set its lifetime.
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

-- Whether a client waits for a prompt. If the server evicted the waiting key, clients wait until the deadline in the job.
local function is_wanted(waiting, deadline, now)
  local _, sole = read_waiting(waiting)
  local count = sole and 2 or redis.pcall('HLEN', waiting)
  if type(count) == 'table' then
    redis.call('UNLINK', waiting)
    count = 0
  end
  return count > 1 or count == 0 and now < (tonumber(deadline) or 0)
end
