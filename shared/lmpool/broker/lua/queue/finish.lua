-- End jobs, each with a row or with a failure, and notify the clients that wait for them.
--
-- KEYS  jobs, dead, waiting key of each job, row key of each job (none if rows are on other masters: then marks are left)
-- ARGV  consumer group, fingerprint, cap of a reply stream, lifetime of a reply stream in ms, cap of the dead letters, consumer,
--       lifetime in ms of a mark, DONE in a waiting key (0: none), number of jobs, host in whose shared memory the rows are ("": none)
--       and then the address of the worker's row server (if any),
--       lifetime of the rows to store in ms (0 if no rows are to be stored), entry of each job,
--       then the rows to store (with a host: references to rows); or with a host alone one string of all places (16 bytes each),
--       then per failed job: index of the job, encoded failure, whether the job becomes a dead letter (0|1)
--
-- Messages carry the stored rows or their places. If another worker has stored a row first, its row stays, and clients fetch that row.
-- A job does not end if its row is missing, or if a client on another host cannot read the row. A failed job that another worker has
-- taken over does not end either.
-- Returns numbers, separated by spaces: how many clients were notified, then indexes of jobs whose rows are missing. "@" before an
-- index means that a client is on another host; "+" means that the caller must call again, to notify the other clients of this job.
-- "=" is followed by the number of jobs that are left in all lanes, if there are any.

-- include names

local HEAD = 10
local host, address = string.sub(ARGV[9], 1, 16), string.sub(ARGV[9], 17)
local row_ms, is_storing = ARGV[10], ARGV[10] ~= '0'
local is_carrying = is_storing or host ~= ''
local PLACE_FIRST, PLACE_LAST = 22, 37 -- First and last byte of the place in shared memory, within a reference to a row.

local was_stored = false
if ARGV[8] == '1' and #KEYS == 4 and #ARGV == HEAD + (is_carrying and 2 or 1) and ARGV[7] == '0'
    and redis.call('EXISTS', backlog) == 0 then
  -- The usual case: one row for one client that waits alone. Defining the functions below would take longer than this case.
  local waiting, row, entry, part = KEYS[3], KEYS[4], ARGV[HEAD + 1], ARGV[HEAD + 2]
  local stored = is_storing and redis.pcall('SET', row, part, 'PX', row_ms, 'NX')
  was_stored = stored and stored.ok
  local value = (was_stored or redis.call('EXISTS', row) == 1) and redis.pcall('GET', waiting)
  local reply = type(value) == 'string' and string.match(value, '^(.-)\n')
  local is_here = reply and host ~= '' and string.sub(reply, -16) == host
  local is_direct = reply and address ~= '' and string.sub(reply, -17, -17) == DIRECT
  if reply and value == reply .. '\n' .. entry and string.sub(reply, 1, #replies) == replies and (host == '' or is_here or is_direct) then
    local extra = {}
    if host ~= '' then
      local place = not is_storing and part or was_stored and string.sub(part, PLACE_FIRST, PLACE_LAST)
      extra = place and (is_here and {'s', place} or {'s', place, 'a', address}) or {}
    elseif was_stored and (tonumber(redis.pcall('XLEN', reply)) or MAX_WITH_ROWS) < MAX_WITH_ROWS then
      extra = {'v', part}
    end
    local sent = redis.pcall('XADD', reply, 'MAXLEN', '~', ARGV[3], '*', 'd', string.sub(waiting, -16), 'f', ARGV[2], 'w',
      ARGV[6], unpack(extra))
    if type(sent) == 'string' then
      redis.call('PEXPIRE', reply, ARGV[4])
      redis.call('UNLINK', waiting)
      local id, worker = string.match(entry, '^(%S+) (.+)$')
      local stream = worker and lane_of .. worker or jobs
      redis.pcall('XACK', stream, ARGV[1], id or entry)
      local is_counted = redis.pcall('XDEL', stream, id or entry) == 1 and worker
        and type(redis.pcall('ZADD', lanes, 'XX', 'INCR', -1, worker)) == 'string'
      local left = is_counted and math.floor(tonumber(redis.pcall('ZINCRBY', lanes, -1, '')) or 0) or 0
      return left > 0 and left < 1e9 and '1 =' .. left or '1'
    end
  end
end

-- include streams
-- include notify
-- include strings

-- Entries with more fields or bytes become dead letters without their fields. NO_PLACE: the job has no row in shared memory.
local MAX_DEAD_FIELDS, MAX_DEAD_BYTES, NO_PLACE = 16, 1048576, string.rep('\0', 16)
local dead, group, mark_ms, count = KEYS[2], ARGV[1], ARGV[7], tonumber(ARGV[8])
-- Index of a failed job -> index of its failure in ARGV.
local failures = {}
for at = HEAD + count + (is_storing and count or is_carrying and 1 or 0) + 1, #ARGV, 3 do
  failures[tonumber(ARGV[at])] = at + 1
end

-- Whether a worker holds a job: the given consumer, or any one if none is given.
local function is_held(entry, ...)
  local stream, id = locate(entry)
  return #redis.pcall('XPENDING', stream, group, id, id, 1, ...) == 1
end

local function bury(failure, entry)
  local stream, id = locate(entry)
  local found = redis.call('XRANGE', stream, id, id)[1]
  if not found then
    return
  end
  local fields, size = found[2], #table.concat(found[2])
  if #fields > 2 * MAX_DEAD_FIELDS or size > MAX_DEAD_BYTES then
    fields = {'bytes', size}
  end
  local outcome = redis.pcall('XADD', dead, 'MAXLEN', '~', ARGV[5], '*', 'e', failure, unpack(fields))
  if type(outcome) == 'table' and not is_spoilt(outcome) then
    redis.call('XADD', dead, 'MAXLEN', '~', ARGV[5], '*', 'e', failure, unpack(fields))
  end
end

-- `are_all`: all rows exist. Usually all rows exist already, or no row exists and one command stores all rows.
local are_all = not is_storing and #KEYS == 2 + 2 * count and redis.call('EXISTS', unpack(KEYS, 3 + count)) == count
if is_storing and not next(failures) then
  local rows = {}
  for i = 1, count do
    rows[2 * i - 1], rows[2 * i] = KEYS[2 + count + i], ARGV[HEAD + count + i]
  end
  are_all = set_together(rows, row_ms, 'NX')
end
local entries, ended, marked, left, unfinished = {}, {}, {}, {}, {}

-- Values of the waiting keys that are strings, because one client waits alone; false for other types. See waiting.lua.
local waits = redis.call('MGET', unpack(KEYS, 3, 2 + count))
for i = 1, count do
  local waiting, row, entry = KEYS[2 + i], KEYS[2 + count + i], ARGV[HEAD + i]
  local failure = failures[i] and ARGV[failures[i]]
  -- `is_stored`: whether the row is known to exist. `part`: the row or its place, which messages carry.
  local is_stored, part = are_all, nil
  if is_storing and not failure then
    local outcome = not are_all and redis.pcall('SET', row, ARGV[HEAD + count + i], 'PX', row_ms, 'NX')
    is_stored = are_all or was_stored or outcome and outcome.ok
    part = is_stored and (host == '' and ARGV[HEAD + count + i] or string.sub(ARGV[HEAD + count + i], PLACE_FIRST, PLACE_LAST))
  elseif host ~= '' then
    part = string.sub(ARGV[HEAD + count + 1], 16 * i - 15, 16 * i)
    part = part ~= NO_PLACE and part
  end
  local size = row and not failure and not is_stored and redis.pcall('STRLEN', row)
  if type(size) == 'table' then
    -- Remove a value of another type, so that a row can be stored under this key.
    redis.call('UNLINK', row)
  end
  if size == 0 or type(size) == 'table' then
    left[#left + 1] = i
  elseif not failure or is_held(entry, ARGV[6]) then
    -- Notify the clients of a prompt once, even if several of the jobs are for the same prompt.
    local is_notified, is_elsewhere = ended[waiting], false
    if not is_notified then
      local newline = waits[i] and string.find(waits[i], '\n', 1, true)
      local sole = newline and string.sub(waits[i], 1, newline - 1)
      is_notified, is_elsewhere = notify_all(waiting, sole, failure, part, host, address)
      if is_notified then
        ended[waiting], ended[#ended + 1] = true, waiting
        marked[#marked + 1] = not failure and waiting or nil
        local named = newline and string.sub(waits[i], newline + 1) or redis.pcall('HGET', waiting, 'job')
        if type(named) == 'string' and named ~= entry and not is_held(named) then
          remove_entries({named}) -- Clients had sent the prompt again, because this job was older than its lifetime.
        end
      end
    end
    if is_elsewhere then
      left[#left + 1] = '@' .. i
    elseif is_notified then
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
for _, waiting in ipairs(mark_ms ~= '0' and marked or {}) do
  -- Leave a mark for a client that looked up the row before it was stored, and submits the prompt now.
  redis.call('HSET', waiting, 'job', DONE)
  redis.call('PEXPIRE', waiting, mark_ms)
end
-- Clients record the worker (field "w") as the home of prompts that continue the finished prompts: the worker has computed a prefix.
local clients = notify_gathered(host ~= '' and 's' or 'v', host, address, 'f', ARGV[2], 'w', ARGV[6])
remove_entries(entries, true)
local answer = table.concat({clients, unpack(left)}, ' ') .. (#unfinished > 0 and ' ' .. table.concat(unfinished, ' ') or '')
answer = jobs_in_lanes > 0 and answer .. ' =' .. jobs_in_lanes or answer
if redis.call('EXISTS', backlog) == 0 then
  return answer
end

-- include fair_queue

move_up(#entries)
return answer
