-- Remove prompts from a model's queue, and notify the clients that wait for these prompts.
--
-- KEYS  jobs, prefix of the waiting keys, then per prompt: waiting key
-- ARGV  consumer group, failure (encoded), cap of a reply stream, lifetime of a reply stream in ms, lease in ms,
--       then per prompt: entry, or "later" for a prompt in the backlog
--
-- Jobs that a worker holds stay, unless the worker has been silent for a lease. A job and its waiting key are removed in one call, so
-- a client that joins at the same time is either notified or keeps its job.
--
-- Returns the number of removed prompts, the number of held prompts, and indexes of prompts to pass again, to notify more clients.

-- include fair_queue
-- include notify

local HEAD, lease = 5, tonumber(ARGV[5])
local removed, held, unfinished = 0, 0, {}

local function is_held(entry)
  local stream, id = locate(entry)
  local pending = redis.pcall('XPENDING', stream, ARGV[1], id, id, 1)[1]
  return type(pending) == 'table' and pending[3] < lease
end

-- Return the error if the caller has no right to read waiting keys: otherwise no client would be notified.
for _, command in ipairs({'GET', 'HRANDFIELD'}) do
  local seen = redis.pcall(command, KEYS[2])
  if type(seen) == 'table' and seen.err and not string.find(seen.err, 'WRONGTYPE', 1, true) then
    return seen
  end
end
count_at('ZCARD', backlog)
count_at('HLEN', backlog_jobs)
for i = 1, #KEYS - 2 do
  local waiting, entry = KEYS[2 + i], ARGV[HEAD + i]
  -- Operators pass the waiting keys, and may pass any keys. The clients may also wait for another job of the same prompt.
  local digest, job, sole = string.sub(waiting, #KEYS[2] + 1), read_waiting(waiting)
  if entry ~= LATER and is_held(entry) then
    held = held + 1
  elseif entry ~= LATER or redis.call('ZSCORE', backlog, digest) then
    if job == entry and not notify_all(waiting, sole) then
      unfinished[#unfinished + 1] = i
    else
      removed = removed + (entry == LATER and drop_later(digest, sole or UNKNOWN) and 1 or remove_entries({entry}, true))
      if job == entry then
        redis.call('UNLINK', waiting)
      end
    end
  end
end
notify_gathered('', '', '', 'e', ARGV[2])
is_backlog_empty()
return {removed, held, unfinished}
