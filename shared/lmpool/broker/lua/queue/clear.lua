-- Take prompts out of a model's queue, and tell the clients that wait for them.
--
-- KEYS  jobs, prefix of the waiting keys, then per prompt: waiting key
-- ARGV  consumer group, failure (encoded), cap of a reply stream, lifetime of a reply stream in ms, lease in ms,
--       then per prompt: entry id, or "later" for what is in the backlog
--
-- What a worker holds stays, and is answered; unless the worker has been silent for a lease, when others would take it over.
-- Who joins a prompt meanwhile is told too: looked at and removed at once.
--
-- Returns how many were removed, how many workers hold, and the numbers of the prompts to call again with: one call tells
-- a bounded number of clients.

-- include queue

local group, failure, lease = ARGV[1], ARGV[2], tonumber(ARGV[5])
local HEAD = 5

-- include tell

local removed, held, unfinished = 0, 0, {}

local function is_held(entry)
  local found = redis.pcall('XPENDING', jobs, group, entry, entry, 1)[1]
  return type(found) == 'table' and found[3] < lease
end

-- One who waits for a prompt: most likely who has queued it.
local function somebody(waiting)
  for _, reply in ipairs(redis.pcall('HRANDFIELD', waiting, 2) or {}) do
    if reply ~= 'job' then
      return reply
    end
  end
  return '?'
end

local function remove_later(waiting)
  -- Whatever somebody has put there as one.
  local digest = string.sub(waiting, #KEYS[2] + 1)
  if not redis.call('ZSCORE', backlog, digest) then
    return true
  end
  local client = somebody(waiting)
  if not tell_all(waiting) then
    return false
  end
  drop_later(digest, client)
  redis.call('UNLINK', waiting)
  removed = removed + 1
  return true
end

local function remove(waiting, entry)
  if is_held(entry) then
    held = held + 1
    return true
  end
  -- Whoever waits there may wait for another job for the same.
  local is_own = redis.pcall('HGET', waiting, 'job') == entry
  if is_own and not tell_all(waiting) then
    return false
  elseif is_own then
    redis.call('UNLINK', waiting)
  end
  redis.pcall('XACK', jobs, group, entry)
  removed = removed + redis.call('XDEL', jobs, entry)
  return true
end

-- Who may not see who waits would tell nobody.
local seen = redis.pcall('HRANDFIELD', KEYS[2], 1)
if type(seen) == 'table' and seen.err and not string.find(seen.err, 'WRONGTYPE', 1, true) then
  return seen
end
local is_behind = count_at('ZCARD', backlog) > 0
count_at('HLEN', backlog_jobs)
for i = 1, #KEYS - 2 do
  local waiting, entry = KEYS[2 + i], ARGV[HEAD + i]
  local is_done
  if entry == LATER then
    is_done = remove_later(waiting)
  else
    is_done = remove(waiting, entry)
  end
  if not is_done then
    unfinished[#unfinished + 1] = i
  end
end
tell_gathered('e', failure)
if is_behind and redis.call('EXISTS', backlog) == 0 then
  -- Nobody has a turn any more: the clock begins anew.
  redis.call('UNLINK', turns, backlog_jobs)
end
return {removed, held, unfinished}
