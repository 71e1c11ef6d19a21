-- Who waits for a prompt, for the scripts that include it. See names.lua.
--
-- Nearly always one client waits, from when its prompt is queued until it ends. Its waiting key is then a string: the client's
-- reply key, a newline, and the entry of the job. Making, reading and removing that takes half as long as a hash. Where
-- something else is to be known, it becomes a hash: "job" -> the entry, LATER or DONE; and each reply key -> "". submit.lua makes
-- such strings and finish.lua reads them by themselves, for that is what is done most often.

-- How long a key lives that somebody has robbed of its expiry.
local FALLBACK_MS = 60000

-- The entry of a prompt's job, LATER or DONE, false for none; and the client that waits alone, where the key is a string. Last,
-- whether something is there that says nothing of clients.
local function read_waiting(waiting)
  local value = redis.pcall('GET', waiting)
  if type(value) == 'string' then
    local reply, entry = string.match(value, '^(.-)\n(.*)$')
    if reply and entry ~= DONE then
      return entry, reply, false
    end
    return false, nil, true
  end
  local job = value and redis.pcall('HGET', waiting, 'job')
  if type(job) == 'table' then
    return false, nil, true
  end
  return job, nil, false
end

-- Make a hash of a string, which lives as long; without a client where the one that was there has left.
local function expand(waiting, entry, reply)
  local lifetime = redis.call('PTTL', waiting)
  redis.call('UNLINK', waiting)
  redis.call('HSET', waiting, 'job', entry, unpack(reply and {reply, ''} or {}))
  redis.call('PEXPIRE', waiting, lifetime > 0 and lifetime or FALLBACK_MS)
end

-- Say where a prompt's job is; only if it has been at `before`, where that is given. A server that is short of memory may have
-- dropped the key: one that is new expires too.
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
