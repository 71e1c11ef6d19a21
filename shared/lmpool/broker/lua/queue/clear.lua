-- Take prompts out of a model's queue, and notify the clients that wait for them.
--
-- KEYS  jobs, prefix of the waiting keys, then per prompt: waiting key
-- ARGV  consumer group, failure (encoded), cap of a reply stream, lifetime of a reply stream in ms, lease in ms,
--       then per prompt: entry, or "later" for what is in the backlog
--
-- What a worker holds stays, and is answered; unless the worker has been silent for a lease, when others would take it over.
-- Clients that join a prompt meanwhile are notified too: looked at and removed at once.
--
-- Returns how many were removed, how many workers hold, and the numbers of the prompts to call again with: one call
-- notifies a bounded number of clients.

-- include fair_queue

local group, failure, lease = ARGV[1], ARGV[2], tonumber(ARGV[5])
local HEAD = 5

-- include notify

local removed, held, unfinished = 0, 0, {}

local function is_held(entry)
  local stream, id = locate(entry)
  local pending = redis.pcall('XPENDING', stream, group, id, id, 1)[1]
  return type(pending) == 'table' and pending[3] < lease
end

-- A client that waits for a prompt: most likely the one that has queued it.
local function a_client(waiting, sole)
  if sole then
    return sole
  end
  for _, reply in ipairs(redis.pcall('HRANDFIELD', waiting, 2) or {}) do
    if reply ~= 'job' then
      return reply
    end
  end
  return '?'
end

local function remove_later(waiting)
  -- A client may have given anything as a waiting key.
  local digest = string.sub(waiting, #KEYS[2] + 1)
  if not redis.call('ZSCORE', backlog, digest) then
    return true
  end
  local _, sole = read_waiting(waiting)
  local client = a_client(waiting, sole)
  if not notify_all(waiting, sole) then
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
  -- The clients there may wait for another job for the same prompt.
  local job, sole = read_waiting(waiting)
  local is_same = job == entry
  if is_same and not notify_all(waiting, sole) then
    return false
  elseif is_same then
    redis.call('UNLINK', waiting)
  end
  removed = removed + remove_entries({entry})
  return true
end

-- A caller that may not see who waits would notify nobody.
for _, command in ipairs({'GET', 'HRANDFIELD'}) do
  local seen = redis.pcall(command, KEYS[2])
  if type(seen) == 'table' and seen.err and not string.find(seen.err, 'WRONGTYPE', 1, true) then
    return seen
  end
end
local had_backlog = count_at('ZCARD', backlog) > 0
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
notify_gathered('', 'e', failure)
if had_backlog and redis.call('EXISTS', backlog) == 0 then
  -- Nobody has anything in the backlog: the virtual time begins anew.
  redis.call('UNLINK', virtual_time, backlog_jobs)
end
return {removed, held, unfinished}
