-- End jobs, with a row in the cache or with a failure, and tell the clients that wait.
--
-- KEYS  jobs, dead, then per job: waiting key,
--       and, to have jobs left alone whose rows are not there, after all of those per job: row key; where
--       rows are on other masters there are none, and marks of them are left for a while instead
-- ARGV  consumer group, fingerprint, cap of a reply stream, lifetime of a reply stream in ms,
--       cap of the dead stream, consumer, lifetime of a mark in ms (0 for none), then per job: entry id,
--       failure (encoded, or '' when the row is stored), dead (0|1)
--
-- The digest is the last 16 bytes of the waiting key. The reply keys were registered by submit.lua and
-- carry the model's hash tag, like every key here.
--
-- A row that was just stored can be missing: the server refused it, or had to evict it at once. Such a job
-- stays as it is, for the worker to store the row again.
--
-- A job that failed is left to whoever holds it now, when that is not the caller: a worker that was silent for a lease has
-- no say any more in whether a prompt can be answered. A row is a row, whoever brings it.
--
-- Returns how many clients were told, then the numbers of the jobs that were left alone, with spaces between.
--
-- What stands in a waiting key may be anything, and so may what is there as a reply stream: it is passed over or
-- replaced, for an error here would keep all the worker's other jobs from ending.
local DIGEST, HEAD = 16, 7
local MOST_CLIENTS, MOST_DEAD_FIELDS, MOST_DEAD_BYTES = 10000, 16, 1048576
local dead = KEYS[2]
local group, fingerprint, mark_ms = ARGV[1], ARGV[2], ARGV[7]
local count = math.floor((#ARGV - HEAD) / 3)
local entries, done, told, left = {}, {}, {}, {}
local replies = string.gsub(jobs, 'jobs$', 'reply')
-- Whether something else than a stream is there, or one that has come to its last id.
local function is_spoilt(outcome)
  return string.find(outcome.err, 'WRONGTYPE', 1, true) or string.find(outcome.err, 'exhausted', 1, true)
end
local function tell(reply, ...)
  local outcome = redis.pcall('XADD', reply, 'MAXLEN', '~', ARGV[3], '*', ...)
  if type(outcome) == 'table' then
    if is_spoilt(outcome) then
      redis.call('DEL', reply)
    end
    redis.call('XADD', reply, 'MAXLEN', '~', ARGV[3], '*', ...)
  end
  told[reply] = true
end
-- Whether there is a row; what can be none is removed, so that the row can be stored.
local function is_stored(row)
  local size = redis.pcall('STRLEN', row)
  if type(size) == 'table' or size == 0 then
    redis.call('DEL', row)
    return false
  end
  return true
end
local function clients_at(waiting)
  local found = {}
  for _, reply in ipairs(redis.pcall('HKEYS', waiting)) do
    if string.sub(reply, 1, #replies) == replies then
      found[#found + 1] = reply
    end
  end
  -- So many clients do not wait for one prompt; if they did, they would find the row by looking.
  return #found > MOST_CLIENTS and {} or found
end
local function bury(failure, fields)
  local size = 0
  for _, part in ipairs(fields) do
    size = size + #part
  end
  if #fields > 2 * MOST_DEAD_FIELDS or size > MOST_DEAD_BYTES then
    fields = {'bytes', size}
  end
  local outcome = redis.pcall('XADD', dead, 'MAXLEN', '~', ARGV[5], '*', 'e', failure, unpack(fields))
  if type(outcome) == 'table' and not is_spoilt(outcome) then
    redis.call('XADD', dead, 'MAXLEN', '~', ARGV[5], '*', 'e', failure, unpack(fields))
  end
end
local function holds(entry)
  local found = redis.pcall('XPENDING', jobs, group, entry, entry, 1, ARGV[6])
  return not found.err and #found == 1
end
for i = 1, count do
  local waiting, row = KEYS[2 + i], KEYS[2 + count + i]
  local digest, at = string.sub(waiting, -DIGEST), HEAD + 3 * (i - 1)
  local entry, failure = ARGV[at + 1], ARGV[at + 2]
  local is_left = row and failure == '' and not is_stored(row)
  local is_ended = not is_left and (failure == '' or holds(entry))
  if is_left then
    left[#left + 1] = i
  elseif is_ended then
    entries[#entries + 1] = entry
  end
  if is_ended and ARGV[at + 3] == '1' then
    local found = redis.call('XRANGE', jobs, entry, entry)
    if #found == 1 then
      bury(failure, found[1][2])
    end
  end
  for _, reply in ipairs(is_ended and clients_at(waiting) or {}) do
    if failure ~= '' then
      tell(reply, 'd', digest, 'e', failure)
    else
      local digests = done[reply]
      if not digests then
        digests = {}
        done[reply] = digests
      end
      digests[#digests + 1] = digest
    end
  end
  if is_ended then
    redis.call('DEL', waiting)
    if mark_ms ~= '0' and failure == '' then
      -- For who has looked for the row before it was stored, and asks for it now.
      redis.call('HSET', waiting, 'job', DONE)
      redis.call('PEXPIRE', waiting, mark_ms)
    end
  end
end
for reply, digests in pairs(done) do
  tell(reply, 'd', table.concat(digests), 'f', fingerprint)
end
local clients = 0
for reply in pairs(told) do
  redis.call('PEXPIRE', reply, ARGV[4])
  clients = clients + 1
end
-- XACK alone would leave the entries in the stream's memory for ever.
if #entries > 0 then
  redis.call('XACK', jobs, group, unpack(entries))
  redis.call('XDEL', jobs, unpack(entries))
end
move_up()
table.insert(left, 1, clients)
return table.concat(left, ' ')
