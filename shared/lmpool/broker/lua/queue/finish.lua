-- End jobs, with a row in the cache or with a failure, and notify the clients that wait.
--
-- KEYS  jobs, dead, then per job: waiting key,
--       and, to have jobs left alone whose rows are not there, after all of those per job: row key; where
--       rows are on other masters there are none, and marks of them are left for a while instead
-- ARGV  consumer group, fingerprint, cap of a reply stream, lifetime of a reply stream in ms,
--       cap of the dead stream, consumer, lifetime of a mark in ms (0 for none), how many jobs,
--       host of whose shared memory the rows lie in ("" for none), for how many ms what is sent is to be stored (0 for not),
--       then per job: entry; then, if something is to be stored, per job: a small row, or a reference if there is a host; or, if
--       there is a host alone, their places (16 bytes for each job, zeros for one that has none); then of each job that failed:
--       its number, the failure (encoded), dead (0|1)
--
-- The digest is the last 16 bytes of the waiting key. The reply keys were registered by submit.lua and
-- carry the model's hash tag, like every key here.
--
-- Small rows and references are given to the script itself, which stores them and has notifications carry them (of a reference
-- the place that it names). Where another one is stored already, that stays, and the client fetches it: all get the same. Once
-- the server has refused one, the rest is not tried.
--
-- A row that was just stored can be missing: the server refused it, or had to evict it at once. Such a job
-- stays as it is, for the worker to store the row again.
--
-- A job that failed is left to the worker that holds it now, when that is not the caller: a worker that was silent for a
-- lease has no say any more in whether a prompt can be answered. A row is a row, whichever worker brings it.
--
-- One call notifies a bounded number of clients. A job whose clients are not all notified yet stays as it is: the caller calls
-- again with it.
--
-- A row in shared memory is of no use to clients on another host: a job that one of them waits for is left alone too.
--
-- Returns how many clients were notified, then the numbers of the jobs that were left alone, with a "@" before them of those
-- whose rows are in shared memory that a client cannot read, and with a "+" of those to call again with, with spaces between.
--
-- What stands in a waiting key may be anything, and so may what is there as a reply stream: it is passed over or
-- replaced, for an error here would keep all the worker's other jobs from ending.

-- include names

local HEAD = 10
local host, row_ms = ARGV[9], ARGV[10]
local is_to_store = row_ms ~= '0'
local is_carrying = is_to_store or host ~= ''
-- Where a reference has the place in it, which is all that notifications carry of it.
local PLACE_FIRST, PLACE_LAST = 22, 37

local was_stored = false
-- One prompt, its row, and one client, which waits for nothing else: making the functions below takes longer than all of this.
if ARGV[8] == '1' and #KEYS == 4 and #ARGV == HEAD + (is_carrying and 2 or 1) and ARGV[7] == '0'
    and not string.find(ARGV[HEAD + 1], ' ', 1, true) and redis.call('EXISTS', backlog) == 0 then
  local waiting, row, entry, part = KEYS[3], KEYS[4], ARGV[HEAD + 1], ARGV[HEAD + 2]
  local stored = is_to_store and redis.pcall('SET', row, part, 'PX', row_ms, 'NX')
  local is_stored = stored and stored.ok
  was_stored = is_stored
  local value = (is_stored or redis.call('EXISTS', row) == 1) and redis.pcall('GET', waiting)
  local reply = type(value) == 'string' and string.match(value, '^(.-)\n')
  if reply and string.sub(reply, 1, #replies) == replies and (host == '' or string.sub(reply, -#host) == host) then
    local extra = {}
    if host ~= '' then
      local place = not is_to_store and part or is_stored and string.sub(part, PLACE_FIRST, PLACE_LAST)
      extra = place and {'s', place} or {}
    elseif is_stored and (tonumber(redis.pcall('XLEN', reply)) or MAX_WITH_ROWS) < MAX_WITH_ROWS then
      extra = {'v', part}
    end
    local sent = redis.pcall('XADD', reply, 'MAXLEN', '~', ARGV[3], '*', 'd', string.sub(waiting, -16), 'f', ARGV[2], 'w',
      ARGV[6], unpack(extra))
    if type(sent) == 'string' then
      redis.call('PEXPIRE', reply, ARGV[4])
      redis.call('UNLINK', waiting)
      redis.pcall('XACK', jobs, ARGV[1], entry)
      redis.pcall('XDEL', jobs, entry)
      return '1'
    end
  end
end

-- include streams
-- include notify
-- include strings

local MAX_DEAD_FIELDS, MAX_DEAD_BYTES = 16, 1048576
local dead = KEYS[2]
local group, fingerprint, mark_ms = ARGV[1], ARGV[2], ARGV[7]
local count = tonumber(ARGV[8])
local entries, ended, stored, left, unfinished = {}, {}, {}, {}, {}
local NOWHERE = string.rep('\0', 16)
-- Number of a job -> where its failure is.
local failures = {}
for at = HEAD + count + (is_to_store and count or is_carrying and 1 or 0) + 1, #ARGV, 3 do
  failures[tonumber(ARGV[at])] = at + 1
end
local bury, is_held
if next(failures) then
  -- Whether the caller holds a job.
  function is_held(entry)
    local stream, id = locate(entry)
    return #redis.pcall('XPENDING', stream, group, id, id, 1, ARGV[6]) == 1
  end

  function bury(failure, entry)
    local stream, id = locate(entry)
    local entries = redis.call('XRANGE', stream, id, id)
    if #entries == 0 then
      return
    end
    local fields, size = entries[1][2], 0
    for _, part in ipairs(fields) do
      size = size + #part
    end
    if #fields > 2 * MAX_DEAD_FIELDS or size > MAX_DEAD_BYTES then
      fields = {'bytes', size}
    end
    local outcome = redis.pcall('XADD', dead, 'MAXLEN', '~', ARGV[5], '*', 'e', failure, unpack(fields))
    if type(outcome) == 'table' and not is_spoilt(outcome) then
      redis.call('XADD', dead, 'MAXLEN', '~', ARGV[5], '*', 'e', failure, unpack(fields))
    end
  end
end
-- Nearly always all rows are there, which one command tells; each costs as much as a tenth of what a job does. What may stand
-- there instead of a row its clients find, and have it replaced.
local are_there = not is_to_store and #KEYS == 2 + 2 * count and redis.call('EXISTS', unpack(KEYS, 3 + count)) == count
local is_refused, are_stored = false, false
if is_to_store and not next(failures) then
  local rows = {}
  for i = 1, count do
    rows[2 * i - 1], rows[2 * i] = KEYS[2 + count + i], ARGV[HEAD + count + i]
  end
  -- Not where one of them is there already, or is refused: then each is tried, and told of.
  are_stored = set_together(rows, row_ms, 'NX')
end
-- Who waits, where that is one client alone; what is no string is nothing here. See waiting.lua.
local waits = redis.call('MGET', unpack(KEYS, 3, 2 + count))
for i = 1, count do
  local waiting, row, entry = KEYS[2 + i], KEYS[2 + count + i], ARGV[HEAD + i]
  local failure = failures[i] and ARGV[failures[i]]
  local part, is_stored = nil, are_there
  if is_to_store and not failure and not is_refused then
    local outcome = not are_stored and redis.pcall('SET', row, ARGV[HEAD + count + i], 'PX', row_ms, 'NX')
    is_refused = outcome and outcome.err
    is_stored = are_stored or outcome and outcome.ok or was_stored
    part = is_stored and ARGV[HEAD + count + i]
    if part and host ~= '' then
      part = string.sub(part, PLACE_FIRST, PLACE_LAST)
    end
  elseif host ~= '' and not is_to_store then
    part = string.sub(ARGV[HEAD + count + 1], 16 * i - 15, 16 * i)
  end
  local size = row and not (failure or is_stored) and redis.pcall('STRLEN', row)
  if type(size) == 'table' then
    -- What can be no row is removed, so that the row can be stored.
    redis.call('UNLINK', row)
  end
  if size == 0 or type(size) == 'table' then
    left[#left + 1] = i
  elseif not failure or is_held(entry) then
    -- A client is notified once, however many of the jobs are for the same.
    local is_told, is_elsewhere = ended[waiting], false
    if not is_told then
      local sole = waits[i] and string.match(waits[i], '^(.-)\n')
      is_told, is_elsewhere = notify_all(waiting, sole, failure, part ~= NOWHERE and part, host)
    end
    if is_told and not ended[waiting] then
      ended[waiting], ended[#ended + 1] = true, waiting
      if not failure then
        stored[#stored + 1] = waiting
      end
    end
    if is_elsewhere then
      left[#left + 1] = '@' .. i
    elseif is_told then
      entries[#entries + 1] = entry
      if failure and ARGV[failures[i] + 1] == '1' then
        bury(failure, entry)
      end
    else
      unfinished[#unfinished + 1] = '+' .. i
    end
  end
end
if #ended > 0 then
  redis.call('UNLINK', unpack(ended))
end
for _, waiting in ipairs(mark_ms ~= '0' and stored or {}) do
  -- For a client that has looked for the row before it was stored, and asks for it now.
  redis.call('HSET', waiting, 'job', DONE)
  redis.call('PEXPIRE', waiting, mark_ms)
end
-- Their clients remember who has computed the prompts: what continues them is best computed there.
local clients = notify_gathered(host ~= '' and 's' or 'v', 'f', fingerprint, 'w', ARGV[6])
remove_entries(entries)
table.insert(left, 1, clients)
for _, number in ipairs(unfinished) do
  left[#left + 1] = number
end
local answer = table.concat(left, ' ')
if redis.call('EXISTS', backlog) == 0 then
  return answer
end

-- Making ready for the rules of the queue takes as long as a few jobs.

-- include fair_queue

move_up(#entries)
return answer
