-- Take prompts out of a model's queue, and notify the clients that wait for them.
--
-- KEYS  jobs, prefix of the waiting keys, then per prompt: waiting key
-- ARGV  consumer group, failure (encoded), cap of a reply stream, lifetime of a reply stream in ms, lease in ms,
--       then per prompt: entry, or "later" for a prompt in the backlog
--
-- Jobs that a worker holds stay, unless the worker has been silent for a lease. A job and its waiting key are removed in one call, so
-- a client that joins at the same time is either notified or keeps its job.
--
-- Returns how many prompts were removed, how many workers hold, and the numbers of the prompts to call again with.

-- include fair_queue
-- include notify

local group, failure, lease = ARGV[1], ARGV[2], tonumber(ARGV[5])
local HEAD = 5
local removed, held, unfinished = 0, 0, {}

local function is_held(entry)
  local stream, id = locate(entry)
  local pending = redis.pcall('XPENDING', stream, group, id, id, 1)[1]
  return type(pending) == 'table' and pending[3] < lease
end

-- A client that waits for a prompt: most likely the client that queued it.
local function any_client(waiting, sole)
  for _, reply in ipairs(sole and {sole} or redis.pcall('HRANDFIELD', waiting, 2) or {}) do
    if reply ~= 'job' then
      return reply
    end
  end
  return UNKNOWN
end

-- Each of these two returns whether the prompt needs no further call.
local function remove_later(waiting)
  -- Operators name the waiting keys, and may name anything.
  local digest = string.sub(waiting, #KEYS[2] + 1)
  if not redis.call('ZSCORE', backlog, digest) then
    return true
  end
  local _, sole = read_waiting(waiting)
  local client = any_client(waiting, sole)
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
  -- The clients may wait for another job of the same prompt.
  local job, sole = read_waiting(waiting)
  if job == entry then
    if not notify_all(waiting, sole) then
      return false
    end
    redis.call('UNLINK', waiting)
  end
  removed = removed + remove_entries({entry})
  return true
end

-- A caller without the right to read waiting keys would notify no client.
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
  -- No client has anything in the backlog, so virtual time can start again.
  redis.call('UNLINK', virtual_time, backlog_jobs)
end
return {removed, held, unfinished}
