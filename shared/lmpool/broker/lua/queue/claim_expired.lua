-- Take over jobs whose worker has been silent for a lease.
--
-- KEYS  jobs, cursor: where the next call goes on
-- ARGV  consumer group, consumer, lease in ms, deliveries a job may have, most jobs to take,
--       idle (0|1): the caller holds no job, most bytes of a job, most bytes of all jobs together but the first,
--       lifetime of the second key in ms, then entries: what the caller holds and has not lost sight of
--
-- What the caller itself is at work on is not taken over, however late its renewal: it would count as a delivery.
--
-- A job that was delivered often is suspected of killing workers. For its last delivery it is taken alone,
-- by a worker that holds nothing else, so that it cannot take others down with it; after that it is handed
-- over as spent, to be given up.
--
-- One call goes through the lanes of some workers whose deadlines have passed, and that of the caller. Then it goes through a
-- part of what workers hold of the shared stream: all workers share one cursor, and where one has ended the next goes on. What
-- was never given to a dead worker remove_gone.lua moves to the shared stream.
--
-- Returns {alone (0|1), list of {entry, encoded job, deliveries before this one, fields 'u', 't' and 'p' or ''}, how many more
-- calls are this worker's share of going through all that is held}. An empty list with alone = 1 asks the caller to come back
-- when it holds nothing, if that is soon. A job that is too large is told by its size alone. What others than bulk clients
-- have joined since has no 'p'.

-- include capacity
-- include waiting
-- include time

local cursor, group, consumer, lease = KEYS[2], ARGV[1], ARGV[2], tonumber(ARGV[3])
local most, want, idle = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6] == '1'
local largest, free_bytes = tonumber(ARGV[7]), tonumber(ARGV[8])
local MAX_SHORT, MAX_TAKEN, MAX_LANES, MAX_CLIENTS, FIRST = 64, 128, 8, 32, '-'
-- Twice this worker's share of all that is held, so that all together see everything between two calls of one.
local MIN_PART, MAX_PART = 50, 500
local own = {}
for at = 10, #ARGV do
  own[ARGV[at]] = true
end
local pending, workers = group_at(jobs).pending, math.max(1, worker_count)
local part = math.max(MIN_PART, math.min(MAX_PART, math.ceil(2 * pending / workers)))
want = math.min(want, MAX_TAKEN)
local taken, is_alone = {}, false
local function field(fields, name)
  for at = 1, #fields, 2 do
    if fields[at] == name then
      return fields[at + 1]
    end
  end
  return ''
end
local function short(value)
  return #value <= MAX_SHORT and value or ''
end

-- Whether a job that a bulk client has queued is waited for by others too: submit.lua leaves those alone that a worker has, for
-- that one is at work on them. Of very many clients some are looked at.
local function is_joined(lifetime)
  local digest = string.match(lifetime, '^%d+ (.+)$')
  local waiting = waiting_for .. (digest or '')
  local _, sole = read_waiting(waiting)
  for _, reply in ipairs(sole and {sole} or redis.pcall('HRANDFIELD', waiting, MAX_CLIENTS) or {}) do
    if string.sub(reply, 1, #replies) == replies and not is_bulk_client(reply) then
      return true
    end
  end
  return false
end

-- Take an entry of a stream. Returns whether it does not fit beside the others.
local function take(stream, suffix, id, deliveries)
  if free_bytes < 0 and #taken > 0 then
    return true
  end
  local entry = redis.call('XRANGE', stream, id, id)[1]
  if not entry then
    -- The entry was deleted while it was pending: nothing is left to do.
    redis.call('XACK', stream, group, id)
    return false
  end
  local job = field(entry[2], 'm')
  free_bytes = free_bytes - #job
  if free_bytes < 0 and #taken > 0 then
    return true
  end
  if #job > largest then
    job = #job
  end
  redis.call('XCLAIM', stream, group, consumer, lease, id, 'JUSTID', 'RETRYCOUNT', deliveries + 1)
  local lifetime, since, priority = field(entry[2], 'u'), field(entry[2], 't'), field(entry[2], 'p')
  if priority == BULK and is_joined(lifetime) then
    priority = ''
  end
  taken[#taken + 1] = {id .. suffix, job, deliveries, short(lifetime), short(since), short(priority)}
  return false
end

-- Take what has expired of a list of jobs that workers hold. Returns where to go on, nil behind the last.
local function take_expired(stream, suffix, held)
  for _, job in ipairs(held) do
    local id, deliveries = job[1], job[4]
    if job[3] >= lease and not (job[2] == consumer and own[id .. suffix]) then
      local alone = deliveries == most - 1
      if alone and #taken == 0 and not idle then
        is_alone = true
        return id
      end
      if (not alone or #taken == 0) and take(stream, suffix, id, deliveries) then
        return id
      end
      is_alone = alone and #taken == 1 and taken[1][1] == id .. suffix
      if is_alone or #taken == want then
        return '(' .. id
      end
    end
  end
end

-- Go through a part of what is held of the shared stream. Returns where the next call goes on.
local function scan(from)
  local held = redis.pcall('XPENDING', jobs, group, from, '+', part)
  if held.err then
    -- Behind the last possible id there is no place. What else is wrong is so from the first one on, too.
    held = redis.call('XPENDING', jobs, group, FIRST, '+', part)
  end
  return take_expired(jobs, '', held) or #held == part and '(' .. held[part][1] or FIRST
end

-- Go through a worker's lane. Returns whether this call is to take no more.
local function scan_lane(worker)
  local stream, suffix = lane_of .. worker, ' ' .. worker
  local held = redis.pcall('XPENDING', stream, group, 'IDLE', lease, FIRST, '+', MAX_PART)
  return not held.err and take_expired(stream, suffix, held) ~= nil
end

local is_full, now = scan_lane(consumer), now_ms()
local gone = tonumber(redis.pcall('ZCOUNT', deadlines, '-inf', '(' .. now)) or 0
-- Not always the first ones: others may be at work on what is left in those lanes.
local begin = gone > MAX_LANES and now % gone or 0
for _, worker in ipairs(redis.pcall('ZRANGEBYSCORE', deadlines, '-inf', '(' .. now, 'LIMIT', begin, MAX_LANES)) do
  if worker ~= consumer then
    is_full = is_full or scan_lane(worker)
  end
end
if is_full then
  return {is_alone and 1 or 0, taken, 0}
end
local from = redis.pcall('GET', cursor)
from = type(from) == 'string' and string.match(from, '^%(?%d+%-%d+$') or FIRST
local next_from = scan(from)
if #taken == 0 and not is_alone and next_from == FIRST and from ~= FIRST then
  next_from = scan(FIRST)
end
redis.call('SET', cursor, next_from, 'PX', ARGV[9])
return {is_alone and 1 or 0, taken, math.floor(pending / (part * workers))}
