-- Who waits for a prompt, for the scripts that include it. See names.lua.
--
-- Nearly always one client waits, from when its prompt is queued until it ends. Its waiting key is then a string: the client's
-- reply key, a newline, and the entry of the job. Making, reading and removing that takes half as long as a hash. Where
-- something else is to be known, it becomes a hash: "job" -> the entry, LATER or DONE; and each reply key -> "".

-- The entry of a prompt's job, LATER or DONE, and the client that waits alone where the key is a string. No job where nothing is
-- there, or something that says nothing; a table where it is something else than a string or a hash.
local function read_waiting(waiting)
  local value = redis.pcall('GET', waiting)
  if type(value) == 'string' then
    local reply, entry = string.match(value, '^(.*)\n(.*)$')
    return entry, reply
  end
  return value and redis.pcall('HGET', waiting, 'job')
end

-- Make a hash of a string, which lives as long.
local function expand(waiting, entry, reply)
  local lifetime = redis.call('PTTL', waiting)
  redis.call('UNLINK', waiting)
  redis.call('HSET', waiting, 'job', entry, reply, '')
  redis.call('PEXPIRE', waiting, lifetime)
end

-- Say where a prompt's job is. A server that is short of memory may have dropped the key: one that is new expires too.
local function place(waiting, entry, lifetime)
  local _, reply = read_waiting(waiting)
  if reply then
    redis.call('SET', waiting, reply .. '\n' .. entry, 'KEEPTTL')
  elseif redis.pcall('HSET', waiting, 'job', entry) == 1 then
    redis.call('PEXPIRE', waiting, lifetime)
  end
end
